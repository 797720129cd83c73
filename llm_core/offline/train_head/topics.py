"""Instructions and first words of user turns for self-distillation.

The target completes every user turn itself; the openings steer it towards what a voice assistant is
asked, and keep the turns diverse.
"""

from __future__ import annotations

PARLEY_INSTRUCTIONS = (
    "You are a helpful AI assistant named Parley. You speak with the user. "
    "Keep every answer short: one or two plain sentences."
)

OTHER_INSTRUCTIONS = (
    "You are a friendly voice assistant. Answer in one or two short sentences.",
    "You are a helpful assistant. Speak plainly and be brief.",
    "You are the voice of a smart home. Answer briefly and politely.",
    "You answer calls for a small hotel. Be warm, short and precise.",
    "You are a support agent of a bank. Help the caller with short, clear answers.",
    "You are a tutor who explains things step by step in simple words.",
    "You are a knowledgeable assistant. Give complete and well organised answers.",
    "You are a cheerful companion who likes to chat. Keep it short.",
    "You are a doctor's receptionist on the phone. Ask for what you need, in short sentences.",
    "You are a travel agent. Answer questions about trips, flights and hotels in a few sentences.",
)

# Lower case without punctuation, as a recogniser of speech may write it.
SPOKEN_OPENINGS = (
    *("set an alarm", "wake me up", "set a timer for", "cancel my", "stop the", "snooze"),
    *("what's the weather", "will it rain", "is it going to be", "how cold is it", "do i need a"),
    *("play some", "play the song", "turn up the", "turn down the", "skip this", "who sings"),
    *("turn on the", "turn off the", "dim the lights", "start the", "lock the", "change the"),
    *("remind me to", "add", "put", "take", "create a list", "what is on my", "make a note"),
    *("when is my next", "do i have", "schedule a", "move my meeting", "am i free", "delete the"),
    *("send an email", "reply to", "read my", "call my", "text my", "did anyone"),
    *("what's happening in", "tell me the news", "who won the", "when does the", "what time"),
    *("how do i cook", "how long do i", "what can i make with", "how many calories", "is there a"),
    *("find me a", "book a", "i want to order", "where is the nearest", "how far is", "what's the"),
    *("how do i get to", "is there traffic", "i need a flight", "what do i need to travel to"),
    *("how much money", "why was my card", "pay my", "transfer", "i lost my", "i want to report"),
    *("what is the interest", "how do i improve my", "what's my", "when is my bill", "order a new"),
    *("what does", "how do you say", "what is the meaning of", "spell", "define", "translate"),
    *("who was", "who is", "who invented", "where was", "what is the capital of", "how old is"),
    *("how tall is", "how many", "what is", "why do", "why is the", "when did", "which"),
    *("tell me a joke", "tell me about", "tell me something", "sing", "flip a coin", "guess"),
    *("are you", "what are you", "what can you", "can you", "could you please", "who made you"),
    *("thank you", "never mind", "no i", "yes please", "good morning", "hello", "goodbye", "okay"),
    *("i feel", "i'm so", "i don't know", "i can't", "i think", "should i", "what should i"),
    *("recommend a", "suggest", "what movie", "which book", "is it a good idea to", "help me"),
    *("convert", "what is ten percent of", "how many days until", "what date is", "calculate"),
    *("how do i fix", "how do i change a", "my car", "my phone", "my back", "my dog", "my son"),
    *("please", "hey", "i'd like to", "i need to", "let's", "give me", "show me", "do you know"),
    *("set the", "set my", "set up", "make it", "wake me", "switch off", "switch the", "open the"),
    *("close the", "raise the", "lower the", "increase the", "decrease the", "is the front door"),
    *("what song is", "i like this", "play my", "shuffle", "pause", "resume", "next", "go back to"),
    *("start playing", "can you play", "play the latest", "tune in to", "what's playing"),
    *("how's the weather", "is it raining", "is it windy", "what's the temperature", "any snow"),
    *("should i take a coat", "forecast for", "will there be", "sunrise", "how hot"),
    *("what's on my calendar", "what do i have", "cancel the", "cancel all", "remove the", "clear"),
    *("reschedule", "invite", "add an event", "add a meeting", "create an", "set a reminder"),
    *("remind me", "remind everyone", "don't forget", "what are my reminders", "any reminders"),
    *("check my email", "check if", "do i have any new", "write an email", "compose", "forward"),
    *("what's the latest", "latest news", "headlines", "what's going on in", "update me on"),
    *("give me the recipe", "recipe for", "how do you make", "what's in a", "can i substitute"),
    *("order me", "order a large", "i'm hungry", "any good restaurants", "reserve a table"),
    *("call me a taxi", "get me a ride", "when's the next train", "buy a ticket", "train times"),
    *("directions to", "take me to", "how long will it take", "traffic on", "what's the fastest"),
    *("do i need a visa", "how much is a", "exchange rate", "what's the time in", "time zone"),
    *("what's the date", "what day is", "what year", "how old am", "when is easter", "how long is"),
    *("post", "tweet", "share", "what's trending", "complain to", "send a message", "tell my"),
    *("who wrote", "who painted", "who plays", "who directed", "what's the population", "how big"),
    *("how high is", "how deep", "how fast", "how heavy", "what year did", "is it true that"),
    *("what's two", "what's the square root", "how many ounces", "how many miles", "divide"),
    *("vacuum", "clean the", "make me a coffee", "brew", "start the dishwasher", "is the oven on"),
    *("pair my", "connect to", "find my phone", "where are my", "volume up", "mute", "be quiet"),
    *("check my balance", "how much did i", "what did i spend", "freeze my", "is my account"),
    *("what's my credit", "can i afford", "raise my limit", "i forgot my pin", "what's my routing"),
    *("my flight", "my luggage", "my package", "my computer", "my friend", "my boss", "my child"),
    *(
        "my head",
        "my tire",
        "my battery",
        "my insurance",
        "my passport",
        "my internet",
        "my dinner",
    ),
    *("how are you", "what's up", "what's your name", "where are you from", "do you like"),
    *("tell me a story", "tell me a fact", "make me laugh", "roll a", "pick a number", "repeat"),
    *("no thanks", "that's wrong", "that's right", "say it again", "speak slower", "i didn't say"),
    *("forget it", "start over", "hold on", "one more thing", "what else", "why not", "really"),
    *(
        "i'm bored",
        "i'm tired",
        "i'm going to",
        "i want",
        "i have a headache",
        "i lost",
        "i forgot",
    ),
    *("what's good for", "how do i get rid of", "how do i learn", "how do i save", "how do i stop"),
)

CASED_OPENINGS = (
    *("Can you", "Could you", "What is", "What are", "What's the best", "How can I", "How do I"),
    *("How does", "Why do", "Why does", "Who was", "Where can I", "When should I", "Which"),
    *("Tell me about", "Explain", "Describe", "Give me", "I need", "I want to", "I'm looking for"),
    *("I'm planning", "I have a", "My", "Is it", "Are there", "Do you", "Does", "Should I"),
    *("Please", "Hello,", "Hi, I", "Thanks,", "What would", "What happens", "How long", "How much"),
    *("", "", "", ""),
)

GENERAL_OPENINGS = (
    *("Write a", "Write a short", "Summarize", "List", "Compare", "What are the main", "Rewrite"),
    *("Explain how", "Explain why", "Describe the", "Discuss", "What were the", "How did"),
    *("Write a Python", "Create a", "Give three", "Translate", "Classify", "Provide", "Design a"),
    *("", "", ""),
)

# School mathematics told as a story.
STORY_OPENINGS = (
    *("A farmer has", "A train", "If a", "Maria buys", "Tom has", "There are", "In a class of"),
    *("A store sells", "John is", "Sarah", "A baker", "Each", "Emma earns", "Mike and his"),
    *("A tank holds", "A book has", "The price of", "Kevin", "Lisa runs", "On Monday"),
    *("Anna has twice as many", "Ben saved", "Carla bakes", "David walks", "Ella reads", "Frank"),
    *("Grace collected", "Henry paid", "Irene's garden", "Jack drives", "Kate sold", "Leo has"),
    *("Mona needs", "Nick is", "Olga bought", "Paul works", "Rosa and", "Sam gives", "Tina's"),
    *("Victor weighs", "Wendy plans", "A bakery", "A bus", "A box contains", "A pizza is cut"),
    *("A carpenter", "A gardener plants", "A painter", "A factory makes", "A library has"),
    *("A movie ticket costs", "A recipe calls for", "A school", "A shop offers a discount of"),
    *("A rope of", "A swimming pool", "A team scored", "A teacher", "A truck carries", "A zoo has"),
    *("Two friends", "Three children share", "Four workers", "Half of the", "A third of"),
    *("In one week,", "Every morning,", "Last year,", "During the summer,", "After school,"),
    *(
        "The bill for",
        "The distance between",
        "The perimeter of",
        "The sum of",
        "The total cost of",
    ),
    *("How many", "What percentage of", "Together,", "His father is", "Her phone", "At a party"),
)
