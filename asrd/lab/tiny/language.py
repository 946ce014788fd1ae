"""The words of the task: names, things, wordings and the sentence of each kind of step.

A sentence is a list of `Slot`s: the words that are valid there, and the earlier slot that it has to agree with. Every
step's sentence has `SENTENCE` tokens, so the length of a response depends only on the number of steps.
"""

from __future__ import annotations

from dataclasses import dataclass

DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday")
GIRLS = ("ann", "mia", "eva", "lily", "zoe", "ruth")
BOYS = ("tom", "ben", "max", "leo", "sam", "noah")
THINGS = ("shells", "coins", "stamps", "marbles", "cards", "books", "apples", "stones")
MAX_NUMBER = 49  # the largest number that has a token of its own

QUESTION_VERBS = {"gain": ("finds", "gets", "wins", "buys"), "lose": ("loses", "sells", "drops", "spends")}
PHRASES = {  # verb and particle have to agree
    "gain": (("picks", "up"), ("takes", "in"), ("digs", "out"), ("sets", "aside")),
    "lose": (("gives", "away"), ("hands", "over"), ("sells", "off"), ("throws", "out")),
}
HOLDS = ("has", "holds", "owns", "counts")
ADVERBS = ("quickly", "happily", "calmly", "proudly")
ADJECTIVES = ("old", "small", "shiny", "pretty")
GONE = ("lost", "stolen", "broken", "burnt")
THEREFORE = ("so", "thus", "hence")
EVEN = {True: "clearly", False: "not"}  # whether a condition holds, in the response

SENTENCE = 15
CLOSING = 6  # "the answer is 17 ." and the end of text

PAD, EOS, MASK, UNK, USER, ASSISTANT = "<|pad|>", "<|eos|>", "<|mask|>", "<|unk|>", "<|user|>", "<|assistant|>"
SPECIAL = (PAD, EOS, MASK, UNK, USER, ASSISTANT)


@dataclass(frozen=True)
class Slot:
    """One position of a response. `options` are the valid words, `weights` how often each is sampled.

    `follows` is the position of an earlier slot; here the option with the same index as there is the valid one.
    """

    options: tuple[str, ...]
    weights: tuple[float, ...] = (1.0,)
    follows: int | None = None

    @property
    def is_free(self) -> bool:
        """True where several words are valid; False where the question determines the word."""
        return len(self.options) > 1


FOUR, THREE = (0.4, 0.3, 0.2, 0.1), (0.7, 0.2, 0.1)


def fixed(*words: str | int) -> list[Slot]:
    return [Slot((str(word),)) for word in words]


def one_of(options: tuple[str, ...]) -> list[Slot]:
    return [Slot(options, FOUR if len(options) == 4 else THREE)]


def _equation(left: int, sign: str, right: int, result: int) -> list[Slot]:
    return [*one_of(THEREFORE), *fixed(left, sign, right, "=", result, ".")]


def change_sentence(
    day: str, subject: Slot, kind: str, amount: int, thing: str, before: int, after: int, start: int
) -> list[Slot]:
    """`monday she quickly picks 5 old shells up so 12 + 5 = 17 .`"""
    verbs, particles = zip(*PHRASES[kind], strict=True)
    return [
        *fixed(day), subject, *one_of(ADVERBS), *one_of(verbs), *fixed(amount), *one_of(ADJECTIVES), *fixed(thing),
        Slot(particles, FOUR, follows=start + 3),
        *_equation(before, "+" if kind == "gain" else "-", amount, after),
    ]  # fmt: skip


def condition_sentence(day: str, subject: Slot, amount: int, thing: str, before: int, after: int) -> list[Slot]:
    """`friday she has 16 shells clearly even now so 16 - 3 = 13 .` or `... 17 shells not even now so 17 - 0 = 17 .`"""
    return [
        *fixed(day), subject, *one_of(HOLDS), *fixed(before, thing, EVEN[before % 2 == 0], "even", "now"),
        *_equation(before, "-", before - after, after),
    ]  # fmt: skip


def double_sentence(day: str, her: str, thing: str, before: int, after: int) -> list[Slot]:
    """`tuesday her old shells quickly double at once so 12 + 12 = 24 .`"""
    return [
        *fixed(day, her), *one_of(ADJECTIVES), *fixed(thing), *one_of(ADVERBS), *fixed("double", "at", "once"),
        *_equation(before, "+", before, after),
    ]  # fmt: skip


def half_sentence(day: str, her: str, thing: str, before: int, after: int) -> list[Slot]:
    """`tuesday half of her old shells get lost so 24 - 12 = 12 .`"""
    return [
        *fixed(day, "half", "of", her), *one_of(ADJECTIVES), *fixed(thing, "get"), *one_of(GONE),
        *_equation(before, "-", before - after, after),
    ]  # fmt: skip


def closing(answer: int) -> list[Slot]:
    return fixed("the", "answer", "is", answer, ".", EOS)


def _words() -> tuple[str, ...]:
    phrases = [word for pairs in PHRASES.values() for pair in pairs for word in pair]
    glue = "she he her his over if they double half of get how many does have now ? . + - = at once the answer is even"
    nouns, asked = (*DAYS, *GIRLS, *BOYS, *THINGS), (*QUESTION_VERBS["gain"], *QUESTION_VERBS["lose"])
    free = (*HOLDS, *ADVERBS, *ADJECTIVES, *GONE, *THEREFORE, *EVEN.values())
    return tuple(dict.fromkeys((*nouns, *asked, *phrases, *free, *glue.split())))


NUMBERS = tuple(str(number) for number in range(MAX_NUMBER + 1))
VOCABULARY = (*SPECIAL, *NUMBERS, *_words())  # a word's place is its token id
ID = {word: index for index, word in enumerate(VOCABULARY)}
EOS_ID, PAD_ID, MASK_ID, UNK_ID = ID[EOS], ID[PAD], ID[MASK], ID[UNK]
