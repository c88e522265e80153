"""Words and phrases of the ``stories`` task: who, what, where, and how things change hands.

Phrases are ``str.format`` templates. Fields: ``name`` (who), ``They`` / ``they`` (that person's
pronoun), ``friend`` (somebody else), ``things`` (what is counted), ``place``, ``n`` and ``m`` (numbers).
"""

from __future__ import annotations

PEOPLE: tuple[tuple[str, str], ...] = (
    ("Eva", "she"), ("Tom", "he"), ("Mia", "she"), ("Ben", "he"), ("Ada", "she"), ("Leo", "he"),
    ("Zoe", "she"), ("Sam", "he"), ("Lily", "she"), ("Max", "he"), ("Nora", "she"), ("Hugo", "he"),
    ("Ruth", "she"), ("Ivan", "he"), ("Aisha", "she"), ("Omar", "he"), ("Yuki", "she"), ("Ravi", "he"),
    ("Greta", "she"), ("Felix", "he"),
)  # fmt: skip

THINGS: tuple[str, ...] = (
    "shells", "apples", "marbles", "stickers", "stones", "stamps", "cards", "nuts", "beads", "cookies",
    "buttons", "pencils", "feathers", "balloons", "candles", "kites", "plums", "carrots", "lanterns", "toy cars",
)  # fmt: skip

GOODS: tuple[tuple[str, str], ...] = (
    ("pen", "pens"), ("book", "books"), ("cake", "cakes"), ("hat", "hats"), ("ball", "balls"), ("map", "maps"),
    ("lamp", "lamps"), ("kite", "kites"), ("bun", "buns"), ("cup", "cups"), ("drum", "drums"), ("scarf", "scarves"),
)  # fmt: skip

PLACES: tuple[str, ...] = (
    "at the beach", "in the park", "in the garden", "at the market", "at school", "under the bed",
    "in the attic", "by the river", "in the forest", "on the hill", "at the fair", "in the barn",
)  # fmt: skip

# How a collection begins; the value is n.
STARTS: tuple[str, ...] = (
    "{name} has {n} {things}.",
    "{name} starts with {n} {things}.",
    "{name} counts {n} {things} {place}.",
    "There are {n} {things} in the box of {name}.",
    "{name} wakes up with {n} {things}.",
)

# How a collection of things changes, by operation: (operator, operand or None for any number n).
CHANGES: dict[tuple[str, int | None], tuple[str, ...]] = {
    ("+", None): (
        "{They} finds {n} more {place}.",
        "{friend} gives {them} {n} more.",
        "Then {they} gets {n} more.",
        "{name} wins {n} more {place}.",
        "A kind neighbour brings {n} more {things}.",
    ),
    ("-", None): (
        "{They} gives {n} to {friend}.",
        "{name} loses {n} {place}.",
        "Then {they} swaps {n} of them for a song.",
        "A cheeky goat runs away with {n}.",
        "{friend} borrows {n} of the {things}.",
    ),
    ("*", 2): (
        "A wizard doubles the {things}.",
        "Overnight the {things} double.",
        "Then {name} doubles the heap.",
    ),
    ("*", 3): (
        "A wizard triples the {things}.",
        "By magic the {things} triple.",
        "Then {name} triples the heap.",
    ),
    ("/", 2): (
        "{They} gives half of them to {friend}.",
        "Half of the {things} roll away.",
        "{name} keeps only half of the {things}.",
    ),
    ("/", 3): (
        "{They} keeps only a third of them.",
        "Only a third of the {things} are still there {place}.",
        "A crow leaves {name} just a third of the {things}.",
    ),
}

# How a purse of coins changes.
COIN_CHANGES: dict[tuple[str, int | None], tuple[str, ...]] = {
    ("+", None): (
        "{They} finds {n} more coins {place}.",
        "{friend} gives {them} {n} coins.",
        "{name} sells a drawing for {n} coins.",
    ),
    ("-", None): (
        "{They} gives {n} coins to {friend}.",
        "{name} pays {n} coins for the bus.",
        "Then {they} loses {n} coins {place}.",
    ),
    ("*", 2): ("A wizard doubles the coins.", "{name} doubles the coins in a game."),
    ("*", 3): ("A wizard triples the coins.", "{name} triples the coins in a game."),
    ("/", 2): ("{They} saves half of the coins and spends the rest.", "Half of the coins fall into the river."),
    ("/", 3): ("{They} keeps only a third of the coins.", "A thief leaves only a third of the coins."),
}

# How much somebody has beside somebody else (``friend`` has the known amount).
COMPARISONS: dict[tuple[str, int | None], tuple[str, ...]] = {
    ("+", None): ("{name} has {n} more {things} than {friend}.", "{name} has {n} more than {friend}."),
    ("-", None): ("{name} has {n} fewer {things} than {friend}.", "{name} has {n} fewer than {friend}."),
    ("*", 2): ("{name} has twice as many as {friend}.", "{name} has twice as many {things} as {friend}."),
    ("*", 3): ("{name} has three times as many as {friend}.", "{name} has three times as many {things} as {friend}."),
    ("/", 2): ("{name} has half as many as {friend}.", "{name} has half as many {things} as {friend}."),
    ("/", 3): ("{name} has a third as many as {friend}.", "{name} has a third as many {things} as {friend}."),
}

QUESTIONS: tuple[str, ...] = (
    "How many {things} does {name} have now?",
    "How many {things} are there now?",
    "How many {things} does {name} have in the end?",
)

SHARE_QUESTIONS: tuple[str, ...] = (
    "How many {things} does {name} have now?",
    "How many {things} does {name} have in the end?",
)

COIN_QUESTIONS: tuple[str, ...] = (
    "How many coins does {name} have now?",
    "How many coins are left?",
    "How many coins does {name} have in the end?",
)

# A steady pace: n each time, m times; the first kind adds to a heap that is there already.
GAINS: tuple[str, ...] = (
    "{name} picks {n} {things} every day for {m} days.",
    "{name} collects {n} {things} each week for {m} weeks.",
    "{name} makes {n} {things} an hour and works for {m} hours.",
)
RATES: tuple[str, ...] = (
    *GAINS,
    "{name} packs {n} {things} into each of {m} boxes.",
    "Each of {m} bags of {name} holds {n} {things}.",
)

ASIDES: tuple[str, ...] = (
    "The sun is shining.",
    "A dog barks {place}.",
    "{friend} sings a song.",
    "It smells of fresh bread.",
    "{friend} is {n} years old.",
    "The bus comes in {n} minutes.",
    "{name} lives in house {n}.",
    "It is a windy day.",
)

# How a written-out answer begins and ends in a document.
LEAD_INS: tuple[str, ...] = ("", "", "Let us see. ", "Step by step: ")
CLOSINGS: tuple[str, ...] = ("The answer is {n}.", "So the answer is {n}.", "Answer: {n}.")

# Small talk, so that a base model has seen turn markers without learning to answer questions in them.
REMARKS: tuple[tuple[str, str], ...] = (
    ("Good morning!", "Good morning, {name}."),
    ("What is your name?", "My name is {name}."),
    ("Where is {friend}?", "{friend} is {place}."),
    ("What do you like?", "I like {things}."),
    ("Is it far?", "No, it is {place}."),
    ("Thank you!", "You are welcome."),
)
MUSINGS: tuple[str, ...] = (
    "{name} is {place}.",
    "I like {things}.",
    "Maybe {friend} has the {things}.",
    "It is a windy day.",
    "The {things} are {place}.",
)
