// The stock realtime client of the OpenAI Agents SDK, pointed at another server. It asks in speech
// and in writing, lets its agent call a function, and prints what happened as one JSON object.
//
//   node agents_client.mjs URL API_KEY SPEECH.pcm     (PCM16, 24 kHz, mono)

import { readFile } from 'node:fs/promises';
import { RealtimeAgent, RealtimeSession, tool } from '@openai/agents-realtime';
import { z } from 'zod';

const [url, apiKey, speechPath] = process.argv.slice(2);
const seen = { calls: [], errors: [], transcripts: [], turns: [], audioBytes: 0, kinds: [] };

const weather = tool({
  name: 'get_weather',
  description: 'Get the weather of a city.',
  parameters: z.object({ city: z.string() }),
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

const session = new RealtimeSession(agent, {
  transport: 'websocket',
  model: 'gpt-realtime',
  config: { audio: { output: { voice: 'marin' } } },
});

// Waiting: for the next event of a type that has not been waited for yet.
const waiting = [];
const queue = [];
function nextOf(type) {
  const at = queue.findIndex((event) => event.type === type);
  if (at >= 0) return Promise.resolve(queue.splice(at, 1)[0]);
  return new Promise((resolve) => waiting.push({ type, resolve }));
}

session.transport.on('*', (event) => {
  seen.kinds.push(event.type);
  if (event.type === 'conversation.item.input_audio_transcription.completed') {
    seen.transcripts.push(event.transcript);
  }
  if (event.type === 'response.done') {
    seen.turns.push({
      status: event.response.status,
      items: event.response.output.map((item) => item.type),
    });
  }
  const at = waiting.findIndex((entry) => entry.type === event.type);
  if (at >= 0) waiting.splice(at, 1)[0].resolve(event);
  else queue.push(event);
});
session.on('error', (error) => seen.errors.push(JSON.stringify(error)));
session.on('audio', (event) => {
  seen.audioBytes += event.data.byteLength;
});

await session.connect({ apiKey, url });
await nextOf('session.updated');

// 1: spoken, at speaking pace; the server finds the end of the turn.
const speech = await readFile(speechPath);
for (let start = 0; start < speech.length; start += 4800) {
  session.sendAudio(new Uint8Array(speech.subarray(start, start + 4800)).buffer);
  await new Promise((resolve) => setTimeout(resolve, 100));
}
await nextOf('response.done');

// 2: written; the agent must call its function, and speaks when it has the result.
session.transport.sendMessage('What is the weather in Paris?', {}, { triggerResponse: false });
session.transport.requestResponse({ tool_choice: 'required' });
await nextOf('response.done');
await nextOf('response.done');

seen.history = session.history.map((item) => ({
  type: item.type,
  role: item.role,
  status: item.status,
  text: item.content?.map((part) => part.text ?? part.transcript ?? '').join(''),
  output: item.output,
}));
session.close();
console.log(JSON.stringify(seen));
