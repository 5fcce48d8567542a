"""Filler sentences, keys and values: seeded, never repeated, in English and Chinese.

The sentences carry no licence and no digits, so no value can occur in them by chance. The pocket
models were trained on the same grammar (tools/pocket), hence a change here is a change of their
training data.
"""

import math
import random
from collections.abc import Iterator, Sequence
from typing import Literal

from llamatool.errors import UsageError
from llamatool.records import record

Language = Literal["en", "zh"]
LANGUAGES: tuple[Language, ...] = ("en", "zh")


@record
class Wording:
    """The texts of a test: one needle, its question, and how the answer begins."""

    needle: str  # with {key} and {value}
    question: str  # with {key}
    cue: str  # between question and answer, where no chat template stands there
    answer_prefix: str  # with {key}; the model continues it with the value
    answer: str  # with {value}; what is expected behind the prefix


WORDINGS: dict[Language, Wording] = {
    "en": Wording(
        "The magic number for {key} is {value}.",
        "Question: What is the magic number for {key}?",
        "\nAnswer:",
        " The magic number for {key} is",
        " {value}",
    ),
    "zh": Wording(
        "「{key}」的魔法数字是{value}。",
        "请问「{key}」的魔法数字是多少？",
        "\n答案：\n",
        "「{key}」的魔法数字是",
        "{value}",
    ),
}


def sentences(language: Language, seed: int) -> Iterator[str]:
    """Sentences in a random order of that seed, each at most once.

    Example: there are 201 million English and 35 million Chinese ones, enough for a haystack of
    100M tokens.
    """
    draw = random.Random(f"sentences {language} {seed}")
    orders = [_Order(pattern, draw.getrandbits(64)) for pattern in _PATTERNS[language]]
    weights = [order.pattern.weight for order in orders]
    while orders:
        order = draw.choices(orders, weights)[0]
        number = order.next_number()
        if number is None:
            weights.pop(orders.index(order))
            orders.remove(order)
            continue
        yield order.pattern.sentence(number)


class KeySource:
    """Draws keys, none of them twice and none within another."""

    def __init__(self, kind: str, language: Language, draw: random.Random) -> None:
        """Keys of one kind: `words`, `names` or `cities`. Raises: UsageError for another."""
        if kind not in KEY_KINDS:
            raise UsageError(f"`{kind[:80]}` is no kind of key", hint=f"known are {_KNOWN_KEYS}")
        self._draw = draw
        self._kind = kind
        self._language = language
        self._used: set[str] = set()

    def next_key(self) -> str:
        """A new key. Raises: UsageError when there is none left."""
        for _ in range(10_000):
            key = self._candidate()
            if key not in self._used and not any(key in k or k in key for k in self._used):
                self._used.add(key)
                return key
        raise UsageError(
            f"more needles than {len(self._used)} keys of the kind `{self._kind}`",
            hint="use --keys words, or fewer needles",
        )

    def _candidate(self) -> str:
        draw = self._draw
        if self._kind == "cities":
            return draw.choice(_CITIES[self._language])
        if self._kind == "names":
            syllables = _SYLLABLES[self._language]
            return "".join(draw.sample(syllables, draw.choice((2, 3)))).capitalize()
        first, second = _KEY_WORDS[self._language]
        separator = " " if self._language == "en" else ""
        return draw.choice(first) + separator + draw.choice(second)


KEY_KINDS = ("words", "names", "cities")
_KNOWN_KEYS = ", ".join(KEY_KINDS)


class ValueSource:
    """Draws values, none of them twice and none within another."""

    def __init__(self, kind: str, draw: random.Random) -> None:
        """Values of one kind: `digits:N`, `word` or `uuid`. Raises: UsageError for another."""
        self.kind, self.num_digits = _value_kind(kind)
        self._draw = draw
        self._used: set[str] = set()

    def next_value(self) -> str:
        """A new value. Raises: UsageError when there is none left."""
        for _ in range(10_000):
            value = self._candidate()
            if value not in self._used and not any(value in v or v in value for v in self._used):
                self._used.add(value)
                return value
        raise UsageError(
            f"more needles than {len(self._used)} different values", hint="use --value digits:6"
        )

    def _candidate(self) -> str:
        draw = self._draw
        if self.kind == "digits":
            low = 10 ** (self.num_digits - 1)
            return str(draw.randrange(low, 10 * low))
        if self.kind == "word":
            return "".join(draw.sample(_SYLLABLES["en"], 3))
        bits = f"{draw.getrandbits(128):032x}"
        return "-".join((bits[:8], bits[8:12], bits[12:16], bits[16:20], bits[20:]))


def _value_kind(kind: str) -> tuple[str, int]:
    name, _, digits = kind.partition(":")
    if name == "digits" and (not digits or digits.isdecimal()):
        num_digits = int(digits or 6) if len(digits) < 4 else 0
        if 2 <= num_digits <= 32:
            return name, num_digits
    elif name in ("word", "uuid") and not digits:
        return name, 0
    raise UsageError(
        f"`{kind[:80]}` is no kind of value", hint="known are digits:2 to digits:32, word, uuid"
    )


class _Pattern:
    """A sentence pattern: one phrase out of each list, with the lists' product of sentences."""

    def __init__(self, weight: int, *parts: Sequence[str] | str) -> None:
        self.weight = weight
        self.parts = tuple((part,) if isinstance(part, str) else tuple(part) for part in parts)
        self.size = math.prod(len(part) for part in self.parts)

    def sentence(self, number: int) -> str:
        """Sentence `number`, in mixed radix over the lists."""
        phrases = []
        for part in self.parts:
            number, which = divmod(number, len(part))
            phrases.append(part[which])
        text = "".join(phrases)
        return text[0].upper() + text[1:]


class _Order:
    """The numbers of a pattern in a random order without memory of those already given.

    A counter goes through a bijection of k-bit numbers (odd multiplications and shifts); results
    above the size are skipped.
    """

    def __init__(self, pattern: _Pattern, seed: int) -> None:
        self.pattern = pattern
        bits = max(8, (pattern.size - 1).bit_length())
        self._mask = (1 << bits) - 1
        self._shift = bits // 2
        self._factor = (seed | 1) & self._mask
        self._offset = (seed >> 20) & self._mask
        self._count = 0

    def next_number(self) -> int | None:
        mask, shift = self._mask, self._shift
        while self._count <= mask:
            x = (self._count + self._offset) & mask
            self._count += 1
            x = (x * 0x9E3779B1) & mask
            x ^= x >> shift
            x = (x * self._factor) & mask
            x ^= x >> shift
            x = (x * 0x85EBCA6B) & mask
            x ^= x >> shift
            if x < self.pattern.size:
                return x
        return None


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split("|")]


_WHO = _words(
    "the farmer|a sailor|the old teacher|my neighbour|the young painter|a quiet gardener|the baker"
    "|the engineer|a tired traveller|the captain|the librarian|her brother|his sister|the doctor"
    "|a local merchant|the musician|the carpenter|a young nurse|the lawyer|our guide|the tailor"
    "|a retired judge|the driver|their cousin"
)
_DID = _words(
    "walked to|looked at|wrote about|talked about|remembered|painted|visited|repaired|described"
    "|sold|bought|admired|measured|cleaned|found|studied|photographed|returned to|dreamed of"
    "|asked about|pointed at|waited beside|kept|showed us"
)
_LIKE = _words(
    "old|small|green|wooden|quiet|broken|bright|heavy|simple|narrow|distant|famous|empty|warm"
    "|cold|strange|round|dusty|tall|forgotten"
)
_THING = _words(
    "bridge|market|garden|house|river|boat|machine|letter|mountain|window|library|road|clock"
    "|field|station|harbour|book|lamp|table|tower|school|door|map|well|orchard|mirror|barn"
    "|fountain|chair|painting|path|wall"
)
_WHEN = _words(
    "in the morning|before the rain|after lunch|near the harbour|with great care|for a long time"
    "|during the winter|on the way home|without saying a word|at the end of the day"
    "|while the birds sang|as the sun went down|early in the spring|just before midnight"
    "|in front of the children|with the help of a friend"
)
_STATE = _words(
    "was empty|looked smaller than before|was closed|smelled of smoke|had a new roof"
    "|was hard to find|belonged to nobody|was covered with snow|stood in the shade|was for sale"
)
_PEOPLE = _words(
    "everyone|nobody|some people|the children|the guests|the visitors|most of us|the workers"
)
_REACTED = _words(
    "went home early|was surprised|laughed|had time to rest|wanted to stay|heard the news"
    "|asked for more tea|sang an old song|missed the train|stayed outside"
)
# "nobody was" but "the guests were": the plural needs its own phrases.
_PLURAL = _words(
    "went home early|were surprised|laughed|had time to rest|wanted to stay|heard the news"
    "|asked for more tea|sang an old song|missed the train|stayed outside"
)

_WHO_ZH = _words(
    "农夫|水手|老师|邻居|画家|园丁|面包师|工程师|旅行者|船长|医生|商人|音乐家|木匠|护士|律师|向导|裁缝"
)
_DID_ZH = _words(
    "走近了|看见了|谈到了|想起了|描绘了|参观了|修理了|描述了|卖掉了|买下了|欣赏了|测量了|打扫了|找到了|研究了|拍摄了"
)
_LIKE_ZH = _words("古老|小巧|安静|破旧|明亮|沉重|简单|狭窄|遥远|著名|空旷|温暖|寒冷|奇怪|高大|陌生")
_THING_ZH = _words(
    "桥|市场|花园|房子|小河|船|机器|信|山|窗户|图书馆|道路|钟|田野|车站|港口|书|灯|桌子|塔|学校|门|地图|水井"
)
_WHEN_ZH = _words(
    "清晨|下雨之前|午饭之后|冬天的时候|回家的路上|一天结束时|太阳下山时|早春|午夜之前|节日里|大雪之后|第二天"
)
_STATE_ZH = _words("空无一人|比以前小|关上了|很难找到|不属于任何人|盖满了雪|立在树荫下|正在出售")

_PATTERNS: dict[Language, tuple[_Pattern, ...]] = {
    "en": (
        _Pattern(3, _WHO, " ", _DID, " the ", _LIKE, " ", _THING, "."),
        _Pattern(6, _WHO, " ", _DID, " the ", _LIKE, " ", _THING, " ", _WHEN, "."),
        _Pattern(
            3, _WHO, " ", _DID, " the ", _LIKE, " ", _THING, " and the ", _THING, " ", _WHEN, "."
        ),
        _Pattern(3, _WHEN, ", ", _WHO, " ", _DID, " the ", _LIKE, " ", _THING, "."),
        _Pattern(2, "the ", _LIKE, " ", _THING, " ", _STATE, " ", _WHEN, "."),
        _Pattern(1, _PEOPLE[:2], " ", _REACTED, " ", _WHEN, "."),
        _Pattern(1, _PEOPLE[2:], " ", _PLURAL, " ", _WHEN, "."),
    ),
    "zh": (
        _Pattern(3, _WHO_ZH, _DID_ZH, _LIKE_ZH, "的", _THING_ZH, "。"),
        _Pattern(5, _WHEN_ZH, "，", _WHO_ZH, _DID_ZH, _LIKE_ZH, "的", _THING_ZH, "。"),
        _Pattern(
            3, _WHEN_ZH, "，", _WHO_ZH, _DID_ZH, _LIKE_ZH, "的", _THING_ZH, "和", _THING_ZH, "。"
        ),
        _Pattern(2, _LIKE_ZH, "的", _THING_ZH, _WHEN_ZH, _STATE_ZH, "。"),
        _Pattern(2, _WHO_ZH, "和", _WHO_ZH, "一起", _DID_ZH, _LIKE_ZH, "的", _THING_ZH, "。"),
    ),
}

_KEY_WORDS: dict[Language, tuple[list[str], list[str]]] = {
    "en": (
        _words(
            "amber|silver|crimson|golden|ivory|violet|copper|azure|scarlet|jade|cobalt|pearl|rusty"
            "|misty|frozen|hidden|gentle|brave|lonely|clever|hungry|sleepy|royal|wild"
        ),
        _words(
            "falcon|otter|lantern|willow|badger|comet|anchor|meadow|raven|turtle|pebble|canyon"
            "|cedar|dragon|engine|forest|glacier|island|jungle|kettle|lizard|marble|needle|orchid"
        ),
    ),
    "zh": (
        _words("琥珀|银色|金色|紫色|青铜|蔚蓝|翡翠|珍珠|冰冻|隐秘|温柔|勇敢|孤独|聪明|饥饿|野生"),
        _words("猎鹰|水獭|灯笼|柳树|彗星|铁锚|草原|乌鸦|海龟|卵石|峡谷|雪松|巨龙|森林|岛屿|兰花"),
    ),
}
_SYLLABLES: dict[Language, list[str]] = {
    "en": _words(
        "ta|vo|ri|lan|mer|do|ka|sel|no|bra|ti|gor|fen|lu|ma|pel|qua|ros|sha|ul|ven|wy|zan|ko|hel"
        "|ja|cy|eth|or|bi"
    ),
    "zh": _words("阿|尔|巴|卡|达|伊|拉|玛|诺|罗|萨|塔|维|娜|菲|格|科|莫|里|斯"),
}
_CITIES: dict[Language, list[str]] = {
    "en": _words(
        "Lisbon|Nairobi|Osaka|Quito|Tromso|Cusco|Hanoi|Dakar|Turin|Perth|Oslo|Lima|Cairo|Minsk"
        "|Riga|Porto|Ghent|Lagos|Delhi|Busan|Tunis|Sofia|Malmo|Fargo|Davos|Accra|Kyoto|Leeds|Izmir"
        "|Bergen|Austin|Bogota|Cardiff|Denver|Durban|Geneva|Havana|Jakarta|Krakow|Lahore|Madrid"
        "|Manila|Naples|Odessa|Prague|Seville|Tbilisi|Utrecht|Vienna|Zagreb"
    ),
    "zh": _words(
        "里斯本|内罗毕|大阪|基多|河内|达喀尔|都灵|珀斯|奥斯陆|利马|开罗|明斯克|里加|根特|拉各斯|釜山|突尼斯"
        "|京都|利兹|日内瓦|哈瓦那|雅加达|马德里|马尼拉|布拉格|维也纳|苏州|桂林|青岛|厦门"
    ),
}
