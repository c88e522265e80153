"""What may stand beside the statements of a list of knights and knaves, so that they stay stated.

A list can be turned round in more words than can be listed. So it is the harmless words that are: headings, what joins
sentences, and the remark that all fits. In a marked answer nothing else may stand. In a response without marks what is
above the list is reasoning, of which the words that lead to the list are looked at; below it an explanation may follow.
"""

from __future__ import annotations

import re

_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")
_NEUTRAL = frozenset(
    _WORD.findall("""
    a above according accordingly across actually all altogether am analysis and answer answers are arrive as
    assignment assignments based be been below both by can case character characters check checked clear clearly
    clue clues coherent complete completely conclude concluded conclusion condition conditions confident confirm
    confirmed confirms consequently consistent constraint constraints correct correctly deduce deduced deduction
    deductions definitely description determine determined determines do done each every everyone everything
    exactly explanation final finally find first fit fits following follows for found from fully further get given
    gives group hard has have having help helps hence here hold holds hope i identification identified identities
    identity in indeed inhabitant inhabitants is island islander islanders it item its lastly lead leads let
    letters list listed logic logical logically long mapping match matches me meet meets member members my name
    names now number of on only order our out outcome overall people person persons problem proven putting puzzle
    question questions reached reading reasoning respective respectively response result results right role roles
    satisfied satisfies satisfy scenario second set shown simply so solution solutions solve solved solves sorry
    statement statements status step steps sum summarise summarize summary table thank thanks that the their them
    then there therefore these they third this those thus to together true truly truthful type types unique
    uniquely up us valid verified verify was way we were what where which who will with work works yes you your 因此
    所以 最终答案 答案 结论
    """)
)
# Remarks whose words are not harmless in another order.
_REMARKS = re.compile(
    r"\b(?:knights?\s+and\s+(?:the\s+)?knaves?|who\s+is\s+a\s+knight\s+and\s+who\s+(?:is\s+)?a\s+knave|knights?\s*/\s*knaves?|"
    r"knights?\s+or\s+(?:a\s+)?knaves?|only\s+possible|(?:there\s+(?:is|are)\s+)?no\s+(?:other|further|more)\s+"
    r"(?:assignments?|solutions?|possibilit(?:y|ies)|cases?|way)(?:\s+(?:is|are)\s+possible)?|no\s+contradictions?(?:\s+arises?)?|without\s+(?:any\s+)?contradictions?|"
    r"(?:the\s+opposite|any\s+other|every\s+other|all\s+other|other)\s+(?:assignments?|cases?|choices?|combinations?)\s+"
    r"(?:leads?\s+to|gives?|yields?|ends?\s+in|results?\s+in)\s+(?:a\s+)?contradictions?|"
    r"not\s+(?:so|very|too|that)\s+(?:hard|difficult|simple|easy)|let\s+me\s+know(?:\s+if\b.*)?|feel\s+free\b.*|"
    r"if\s+you\s+have\s+(?:any\s+)?(?:further\s+)?questions|(?:who\s+)?always\s+(?:lies|tells\s+the\s+truth)"
    r"|(?:all\s+)?knights\s+(?:always\s+)?tell\s+the\s+truth,?\s+(?:and|while)\s+(?:all\s+)?knaves\s+(?:always\s+)?lie)\b"
    r"|<[^<>\s]{1,20}>|\(\s?(?:a\s+|the\s+)?(?:truth[\s-]teller|liar)\s?\)|\\(?:q?quad|hline|newline|left|right|item|(?:begin|end)[a-z]*)",
    re.IGNORECASE,
)
_REASON = re.compile(r"\b(?:because|since)\b[^.!?;\n]*", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?;\n]|:(?=\s)")
# Behind a list: here an explanation begins, which may suppose and deny what it likes.
_EXPLAINS = re.compile(
    r"\b(?:because|since|if|when|says|said|claims|claimed|tells|stated|assum\w+|suppos\w+|knaves?\s+(?:lied|lies?))\b"
    r"|^\W*(?:explanations?|reasons?|reasoning|verification|justification|proof|check|steps?|notes?|analysis)\W*$",
    re.IGNORECASE,
)
# In front of a list: words that suppose, deny, doubt, report or offer alternatives.
_UNSURE = re.compile(
    r"\b(?:if|unless|whether|either|or|would|could|might|may|perhaps|maybe|possibly|suppos\w*|assum\w*|imagine|says?|said|"
    r"claim\w*|not|\w+n['’]t|cannot|never|no|none|neither|nor|doubt\w*|false\w*|untrue|wrong\w*|incorrect\w*|mistake\w*|"
    r"impossible|opposite|lies?|reverse\w*|contrary|negation|inverse|inverted|swapp?\w*|exchange\w*|flip\w*|vice|otherwise|"
    r"instead\s+of|anything|hardly|unlikely|kidding)\b",
    re.IGNORECASE,
)
_CLAUSE_END = re.compile(r"[.!?;,](?=\s)")
_DOUBT_SIGNS = re.compile(r"[?¬≠✗✘❌✖]")
# A line without a colon that runs on into the list: "If", "It cannot be that", "or".
_RUNS_ON = re.compile(
    r"\W*(?:\w+\W+)?\w+\W*|.*\b(?:if|that|or|nor|not|whether|unless|either|suppose|of|be)\W*", re.IGNORECASE
)
_RUN_ON_END = re.compile(r"[.!?;\n]|\s(?=[A-Z])")  # "Zoey is a knight The opposite is true"


def is_neutral(text: str) -> bool:
    """Whether the text has harmless words only: a heading, a conjunction, "this is the only solution"."""
    rest = _REASON.sub(" ", _REMARKS.sub(" ", text))
    words = (word.casefold().replace("’", "'").removesuffix("'s") for word in _WORD.findall(rest))
    return not _DOUBT_SIGNS.search(rest) and all(word in _NEUTRAL for word in words)


def leads_on(text: str) -> bool:
    """Whether words in front of a statement on its line leave it stated."""
    return _UNSURE.search(_REMARKS.sub(" ", _CLAUSE_END.split(text)[-1])) is None


def introduces(line: str, names: re.Pattern[str]) -> bool:
    """Whether the line above a list leaves it stated; a sentence that has ended says nothing about it."""
    line = line.strip()
    if not line.endswith((":", "：")) and (line.endswith((".", "!", "?")) or names.search(line)):
        return True
    return leads_on(line) or not (line.endswith((":", "：")) or _RUNS_ON.fullmatch(line))


def leaves_standing(text: str, names: re.Pattern[str]) -> bool:
    """Whether what follows the statements leaves them stated: harmless sentences, up to one that begins to explain."""
    end = _RUN_ON_END.search(text)
    own, rest = (text, "") if end is None else (text[: end.start()], text[end.end() :])
    if _UNSURE.search(_REMARKS.sub(" ", own)) or _DOUBT_SIGNS.match(text.lstrip(" )")):
        return False
    for sentence in _SENTENCE_END.split(rest):
        if names.search(sentence) or _EXPLAINS.search(sentence):
            return True
        if not is_neutral(sentence):
            return False
    return True
