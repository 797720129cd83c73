// The stock realtime client of the OpenAI Agents SDK in a page of another origin, over WebRTC.
// `converse` does what a caller does and gives what was seen.

import { OpenAIRealtimeWebRTC, RealtimeAgent, RealtimeSession, tool } from '/bundle/openai-realtime-agents.mjs';

export async function converse(url, apiKey) {
  const seen = { calls: [], errors: [], transcripts: [], turns: [], kinds: [], loudest: 0 };
  const weather = tool({
    name: 'get_weather',
    description: 'Get the weather of a city.',
    parameters: {
      type: 'object',
      properties: { city: { type: 'string' } },
      required: ['city'],
      additionalProperties: false,
    },
    strict: true,
    execute: async ({ city }) => {
      seen.calls.push(city);
      return `sunny in ${city}, 21 degrees`;
    },
  });
  const agent = new RealtimeAgent({
    name: 'Assistant',
    instructions: 'You are a helpful assistant. Answer in one short sentence.',
    tools: [weather],
  });
  // The client's own audio element, given to it only so that what comes out can be measured.
  const audioElement = document.createElement('audio');
  const transport = new OpenAIRealtimeWebRTC({ audioElement });
  const session = new RealtimeSession(agent, { transport, model: 'gpt-realtime' });

  const waiting = [];
  const queue = [];
  function nextOf(type) {
    const at = queue.findIndex((event) => event.type === type);
    if (at >= 0) return Promise.resolve(queue.splice(at, 1)[0]);
    return new Promise((resolve) => waiting.push({ type, resolve }));
  }
  transport.on('*', (event) => {
    seen.kinds.push(event.type);
    if (event.type === 'conversation.item.input_audio_transcription.completed') {
      seen.transcripts.push(event.transcript);
    }
    if (event.type === 'response.done') {
      const { status, output } = event.response;
      seen.turns.push({ status, items: output.map((item) => item.type) });
    }
    const at = waiting.findIndex((entry) => entry.type === event.type);
    if (at >= 0) waiting.splice(at, 1)[0].resolve(event);
    else queue.push(event);
  });
  session.on('error', (error) => seen.errors.push(JSON.stringify(error)));

  await session.connect({ apiKey, url });
  seen.callId = transport.callId;
  const context = new AudioContext();
  const meter = new AnalyserNode(context);
  context.createMediaStreamSource(audioElement.srcObject).connect(meter);
  const samples = new Float32Array(meter.fftSize);
  const measuring = setInterval(() => {
    meter.getFloatTimeDomainData(samples);
    seen.loudest = Math.max(seen.loudest, ...samples.map(Math.abs));
  }, 20);

  // 1: spoken, by the fake microphone; the server finds the end of the turn.
  await nextOf('response.done');
  await nextOf('output_audio_buffer.stopped');
  seen.heardAloud = seen.loudest;

  // 2: written; the agent must call its function, and answers when it has the result.
  transport.sendMessage('What is the weather in Paris?', {}, { triggerResponse: false });
  transport.requestResponse({ tool_choice: 'required' });
  await nextOf('response.done');
  await nextOf('response.done');
  await nextOf('output_audio_buffer.stopped');

  // 3: interrupted by the page.
  session.sendMessage('Tell me a story.');
  await nextOf('output_audio_buffer.started');
  await nextOf('output_audio_buffer.started');
  await nextOf('output_audio_buffer.started');
  session.interrupt();
  await nextOf('output_audio_buffer.cleared');
  await nextOf('response.done');

  clearInterval(measuring);
  seen.history = session.history.map((item) => ({
    type: item.type,
    role: item.role,
    text: item.content?.map((part) => part.text ?? part.transcript ?? '').join(''),
    output: item.output,
  }));
  session.close();
  return seen;
}
