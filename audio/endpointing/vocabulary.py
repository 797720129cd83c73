"""English word lists that tell complete from incomplete sentences, for the semantic endpointer."""

from __future__ import annotations

from audio.text import word_set

ARTICLES_AND_DETERMINERS = word_set(
    "a an the my your his its our their every each some any no this these those another which whose"
)
PREPOSITIONS = word_set(
    "of to from with without for at by into onto toward towards between among during until till "
    "since against because than via per upon within regarding concerning except despite besides "
    "beneath beside"
)
CONJUNCTIONS = word_set(
    "and or but nor if whether while although though unless whereas because when where as that plus"
)
SUBJECT_PRONOUNS = word_set("i we he she they i'm we're they're you're i'd i'll i've it's")
FILLERS = word_set("um uh uhm umm er erm eh hm hmm mm like well so anyway basically actually maybe")
"""Hesitations."""

TRAILING_WORDS = ARTICLES_AND_DETERMINERS | PREPOSITIONS | CONJUNCTIONS | SUBJECT_PRONOUNS
"""Cannot end a sentence, even before the recogniser's full stop; exceptions follow."""

MAY_END_QUESTION = word_set(
    # "Where are you from?", "What is it for?", "Is it his?", "Who are they?", "Which one is that?"
    "of to from with for at by without into until till since against this these those his that "
    "some any no another each as where when why so he she they we i"
)
MAY_END_STATEMENT = word_set(
    # "I want this.", "Turn it to this one, not that.", "No.", "I'd like some.", "I don't know why."
    "this these those that no some any his each another to with for"
)

TRAILING_PHRASES = (
    "want to",
    "like to",
    "going to",
    "need to",
    "able to",
    "kind of",
    "sort of",
    "a lot of",
    "such as",
    "you know",
    "i mean",
    "let me see",
    "let's see",
    "in order to",
    "as well as",
    "so that",
    "can you",
    "could you",
    "would you",
    "do you",
    "how do",
    "what's the",
    "tell me about",
    "call me",
    "give me",
    "show me",
    "remind me",
    "set up",
    "one more",
    "the next",
    "the first",
    "the best",
    "the same",
)

LEAD_INS = (
    # Before a name, number or address, which callers often give in two or three breaths.
    "my name is",
    "my name's",
    "my number is",
    "my phone number is",
    "phone number is",
    "number is",
    "my email is",
    "email is",
    "my address is",
    "address is",
    "i live at",
    "the code is",
    "code is",
    "account number is",
    "it's spelled",
    "spelled",
)

OBJECT_VERBS = word_set(
    # Incomplete without an object.
    "get gets got buy bought want wants need needs make makes made take takes took bring find put "
    "give gives gave send sends sent show set sets add adds create schedule cancel book reserve "
    "order turn tell tells told have has had let keep use used turned increase decrease put "
    "afraid going gonna trying looking talking thinking wondering asking"
)

REQUEST_VERBS = word_set(
    "name explain describe list compare recommend translate define find give show set tell bring"
)
"""Begin a request, but do not make one alone."""
POLITE_WORDS = word_set("please can could would will you just and so now then okay")

OPENERS = word_set("and so but or then okay ok well yes yeah no um uh now oh also")
"""May stand before the sentence proper."""
SUBJECTS = ((ARTICLES_AND_DETERMINERS | SUBJECT_PRONOUNS) - word_set("which whose")) | word_set(
    "it you he's she's that that's there there's here's some one i've we've they've we'd "
    "they'd he'd she'd you've you'd"
)
"""Begin a declarative sentence."""
WISHES = word_set("want wants need needs would like i'd we'd wanna wish looking wondering calling")
"""Among the first words they make the sentence a request."""

SUBORDINATORS = word_set("if when while because although though unless since whenever")
"""A clause that begins with one needs a main clause."""

QUESTION_WORDS = word_set(
    "what who whom whose which where when why how can could do does did is are was were will would "
    "should shall may have has am what's who's where's when's how's isn't aren't don't"
)

SINGLE_DIGITS = word_set("zero oh one two three four five six seven eight nine double triple")
NUMBER_WORDS = SINGLE_DIGITS | word_set("ten eleven twelve hundred thousand")
ALPHABET_WORDS = word_set(
    "alpha bravo charlie delta echo foxtrot golf hotel india juliet kilo lima mike november oscar "
    "papa quebec romeo sierra tango uniform victor whiskey x-ray yankee zulu"
)

WHOLE_ANSWERS = frozenset(
    (
        "yes",
        "no",
        "yeah",
        "yep",
        "nope",
        "okay",
        "ok",
        "sure",
        "right",
        "exactly",
        "thanks",
        "thank you",
        "please",
        "hello",
        "hi",
        "hey",
        "good morning",
        "good evening",
        "goodbye",
        "bye",
        "stop",
        "wait",
        "cancel",
        "never mind",
        "yes please",
        "no thanks",
        "no thank you",
        "of course",
        "not really",
        "i don't know",
        "that's right",
        "that's all",
    )
)
