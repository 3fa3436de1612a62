"""JSON that Spark's variant parser refuses or rounds: marks for inexact numbers, and a scanner of fields and faults."""

# The variant parser builds the whole document, so it also refuses faults of ignored fields: a long number, a deep
# array, a name that occurs twice. Here one regular expression cuts the document into tokens, and the grammar is
# followed token by token: ignored fields must be JSON, and nothing more. All of it is Spark SQL, since a cluster may
# have no Python.
#
# Every quantified group in the expressions is possessive. Java follows those in a loop, and any other by recursion,
# which overflows the stack in a long value.

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import Column

_SPACE = r"[ \t\r\n]*+"
_STRING = r'"(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+'
_NUMBER = r"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?+(?:[eE][+-]?[0-9]++)?+"
_TOKEN = rf'(?:[{{}}\[\]:,]|{_STRING}"|{_NUMBER}|true|false|null){_SPACE}'
_SOUND = rf"^{_SPACE}(?:{_TOKEN})*+"
_HIGH, _LOW = r"\\u[dD][89abAB][0-9a-fA-F]{2}", r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
# A string up to its end, or up to the first half of a surrogate pair.
_PAIRED = rf'^"(?:[^"\\]++|\\[^u]|{_HIGH}{_LOW}|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{{4}})*+'
# Half a pair, or perhaps none: `\\ud83d` is a backslash and plain text. The lookbehind comes last, since it is slow.
_PERHAPS_HALF = rf"\\(?:\\u[dD][89a-fA-F]|{_HIGH[2:]}(?!{_LOW})|{_LOW[2:]}(?<!{_HIGH}{_LOW}))"
# A whole document without half of a pair.
_ALL_PAIRED = rf"^(?:[^\\]++|\\[^u]|{_HIGH}{_LOW}|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{{4}})*+\z"
_UTF8 = (
    r"^(?:[\x00-\x7f]++|[\xc2-\xdf][\x80-\xbf]|\xe0[\xa0-\xbf][\x80-\xbf]|[\xe1-\xec\xee\xef][\x80-\xbf]{2}|"
    r"\xed[\x80-\x9f][\x80-\xbf]|\xf0[\x90-\xbf][\x80-\xbf]{2}|[\xf1-\xf3][\x80-\xbf]{3}|"
    r"\xf4[\x80-\x8f][\x80-\xbf]{2})*+"
)
# Jackson's limit for a number. No declared type has as many digits.
_MAX_DIGITS = 1000
# Its limit for levels, and that of a variant for its bytes.
_MAX_DEPTH = 1000
_MAX_BYTES = 16 * 1024 * 1024
# Open brackets are split at this length: a million of them, copied whole at each token, would take minutes.
_TOKENS_PER_STEP = 100

# The kinds of tokens that may follow: `v` is a number, true, false or null, and any other kind is its first character.
_VALUE, _FIRST, _NAME, _FIRST_NAME = '"v{[', '"v{[]', '"', '"}'
_EXPECTED = {
    _VALUE: "a value",
    _FIRST: "a value or ]",
    _NAME: "a name",
    _FIRST_NAME: "a name or }",
    ":": ":",
    ",}": ", or }",
    ",]": ", or ]",
}


def has_lone_surrogate(text: Column) -> Column:
    """Whether a JSON document escapes half of a surrogate pair, which is no character."""
    from pyspark.sql import functions as F

    escapes = F.contains(text, F.lit(r"\ud")) | F.contains(text, F.lit(r"\uD"))
    return escapes & text.rlike(_PERHAPS_HALF) & ~text.rlike(_ALL_PAIRED)


# A mark is put before a number that the variant parser would read as a double, in a string that is put in its place.
EXACT = "\ue000number as written"
# How a document may write the first character of that itself. Its mark depends on all of it, and is as long.
_OWN = r"\x{e000}|\\u[eE]000"
# Where such a number may be: the text before it in a document is hardly ever similar.
_ROUNDED = r"[:,\[ \t\r\n]-?+(?:[0-9.]++[eE]|[0-9.]{39}%s)"
# A number of more than 38 digits, or with an exponent, after all that is none. `\G` is where the last match ended.
_PLAIN = r"""(?:[^"0-9NI-]++|"(?:[^"\\]++|\\.)*+"|-?[0-9.]{1,38}+(?![0-9.eE]))*+"""
# A number in the place of a name stays one: as a string it would make a document JSON that is none.
_INEXACT = rf"\G({_PLAIN})({_NUMBER}(?![0-9.eE])%s)(?!{_SPACE}:)"


def may_round_numbers(text: Column, *, infinite: bool = False) -> Column:
    """Whether the variant parser may round a number of a document, or refuse it.

    Args:
        text: the document.
        infinite: whether NaN and infinities, which are no JSON, are numbers too.
    """
    return text.rlike(_ROUNDED % ("|NaN|Infinity" if infinite else ""))


def build_number_mark(text: Column, *, infinite: bool) -> Column:
    """The mark of a document's numbers, with which no string in it begins; null if the parser rounds none of them."""
    from pyspark.sql import functions as F

    hashed = F.lpad(F.hex(F.xxhash64(text)), len(EXACT) - 1, "0")
    mark = F.when(text.rlike(_OWN), F.concat(F.lit(EXACT[0]), hashed)).otherwise(EXACT)
    return F.when(may_round_numbers(text, infinite=infinite), mark)


def mark_inexact_numbers(text: Column, mark: Column, *, infinite: bool) -> Column:
    """A document with strings, which begin with a mark, in the place of numbers that the variant parser would round.

    Args:
        text: the document in UTF-8, JSON or not.
        mark: what `build_number_mark` gives; where it is null the document stays as it is.
        infinite: whether NaN, Infinity and -Infinity, which are no JSON, become such strings too.
    """
    from pyspark.sql import functions as F

    names = "|NaN|-?Infinity" if infinite else ""
    marked = F.concat(F.lit('$1"'), mark, F.lit('$2"'))
    return F.when(mark.isNotNull(), F.regexp_replace(text, F.lit(_INEXACT % names), marked)).otherwise(text)


def describe_invalid_utf8(value: Column) -> Column:
    """The fault of bytes that are not UTF-8."""
    from pyspark.sql import functions as F

    sound = F.regexp_extract(F.decode(value, "ISO-8859-1"), _UTF8, 0)
    return F.concat(F.lit("the value is not UTF-8 at byte "), F.length(sound))


def describe_refusal(text: Column, what: str) -> Column:
    """Why the parser of variants refuses a document that is JSON by its grammar.

    Args:
        text: the document.
        what: the part that is read, as a subject.
    """
    from pyspark.sql import functions as F

    opened = F.length(text) - F.length(F.translate(text, "{[", ""))
    twice = "has a name twice in an object"
    return (
        F.when(F.octet_length(text) > _MAX_BYTES, F.lit(f"{what} is longer than 16 MiB"))
        .when(opened > _MAX_DEPTH, F.lit(f"{what} is nested deeper than {_MAX_DEPTH:,} levels, or {twice}"))
        .otherwise(F.lit(f"{what} {twice}"))
    )


def extract_valid_part(text: Column) -> Column:
    """A document as far as it consists of JSON's tokens."""
    from pyspark.sql import functions as F

    return F.regexp_extract(text, _SOUND, 0)


def scan_document(text: str, sound: str, names: Sequence[str] | None, whole: Sequence[str] = ()) -> Column:
    """The struct of `problem`, null in a sound document, and `fields`, a document of the declared fields alone.

    A declared field that is an object or an array is an empty one in `fields`. Positions count bytes from 0.

    Args:
        text: the column of documents in UTF-8.
        sound: the column of their sound parts.
        names: the names of declared fields in the outermost object; None where every member matters, and is in
            `fields` as it is written.
        whole: names whose objects and arrays are in `fields` as they are written.
    """
    from pyspark.sql import functions as F

    kind = "if(instr('{}[]:,\"', left(t, 1)) > 0, left(t, 1), 'v')"
    tokens = f"transform(regexp_extract_all({sound}, {_quote_raw(_TOKEN)}, 0), t -> struct(t AS text, {kind} AS kind))"
    begin = (
        f"named_struct('at', octet_length(regexp_extract({sound}, {_quote_raw(_SPACE)}, 0)), 'want', '{_VALUE}', "
        "'open', '', 'outer', CAST(array() AS ARRAY<STRING>), 'name', CAST(NULL AS STRING), "
        "'seen', CAST(array() AS ARRAY<STRING>), 'fields', '', 'problem', CAST(NULL AS STRING)"
    )
    if whole or names is None:
        space = f"length(regexp_extract({sound}, {_quote_raw(_SPACE)}, 0))"
        begin += f", 'character', {space}, 'begin', 0, 'kept', CAST(NULL AS STRING)"
    begin += ")"
    rest = f"substr({text}, length({sound}) + 1)"
    end = f"named_struct('problem', coalesce(s.problem, {_build_end_fault(rest)}), 'fields', {_FIELDS})"
    step = f"if(s.problem IS NULL, {_build_step(text, names, whole)}, s)"
    return F.expr(f"aggregate({tokens}, {begin}, (s, t) -> {step}, s -> {end})")


_FIELDS = "concat('{', substr(s.fields, 2), '}')"
# Whether a token belongs to the outermost object itself.
_OUTERMOST = "s.open = '{' AND size(s.outer) = 0"


def _quote_raw(pattern: str) -> str:
    """A literal in SQL whose backslashes are backslashes."""
    return f"r'{pattern}'"


def _quote_literal(text: str) -> str:
    """A text as a literal in SQL; Spark reads backslashes in it."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _let(name: str, value: str, body: str) -> str:
    """An expression that names another one, so that it is evaluated once."""
    return f"element_at(transform(array({value}), {name} -> {body}), 1)"


def _build_step(document: str, names: Sequence[str] | None, whole: Sequence[str]) -> str:
    """The state `s` after the token `t` of a column of documents."""
    longest = 12 * max(map(len, names or ()), default=0) + 2  # a character may be escaped as a pair, \ud83d\ude00
    name = f"regexp_extract(t.text, {_quote_raw('^' + _STRING + chr(34))}, 0)"  # without the space after it
    declared = ", ".join(map(_quote_literal, names or ()))
    read = f"try_variant_get(try_parse_json({name}), '$', 'string')"
    if names is not None:
        read = f"if(octet_length({name}) <= {longest}, {read}, NULL)"
    # `n` is the declared field that the token names, `v` says whether it is the value of one.
    found = (
        f"if({_OUTERMOST} AND t.kind = '\"' AND NOT contains(s.want, 'v'), "
        f"{read if names is None else _let('n', read, f'if(array_contains(array({declared}), n), n, NULL)')}, NULL)"
    )
    value = f"({_OUTERMOST} AND contains(s.want, 'v') AND s.name IS NOT NULL)"
    opens, closes, full = "t.kind IN ('{', '[')", "t.kind IN ('}', ']')", f"octet_length(s.open) >= {_TOKENS_PER_STEP}"
    emptied = "octet_length(s.open) = 1 AND size(s.outer) > 0"
    brackets = (
        f"CASE WHEN {opens} AND {full} THEN {_build_brackets('t.kind', 'concat(s.outer, array(s.open))')} "
        f"WHEN {opens} THEN {_build_brackets('concat(s.open, t.kind)', 's.outer')} "
        f"WHEN {closes} AND {emptied} "
        f"THEN {_build_brackets('element_at(s.outer, -1)', 'slice(s.outer, 1, size(s.outer) - 1)')} "
        f"WHEN {closes} THEN {_build_brackets('left(s.open, octet_length(s.open) - 1)', 's.outer')} "
        f"ELSE {_build_brackets('s.open', 's.outer')} END"
    )
    want = (
        f"CASE WHEN t.kind = '{{' THEN '{_FIRST_NAME}' WHEN t.kind = '[' THEN '{_FIRST}' "
        f"WHEN t.kind = ':' THEN '{_VALUE}' WHEN t.kind = ',' THEN if(right(s.open, 1) = '{{', '{_NAME}', '{_VALUE}') "
        "WHEN t.kind = '\"' AND NOT contains(s.want, 'v') THEN ':' "
        "WHEN b.open = '' THEN '' WHEN right(b.open, 1) = '{' THEN ',}' ELSE ',]' END"
    )
    text = "CASE t.kind WHEN '{' THEN '{}' WHEN '[' THEN '[]' ELSE t.text END"
    fields = f"if({value}, concat(s.fields, ',', {_quote_member_name('s.name', names)}, ':', {text}), s.fields)"
    path_name = ""
    if whole or names is None:
        # A wanted object or array begins here, and is copied from the document at its end.
        keeps = f"({value} AND {opens})"
        if names is not None:
            keeps = f"({value} AND {opens} AND s.name IN ({', '.join(map(_quote_literal, whole))}))"
        ends = f"(s.kept IS NOT NULL AND {closes} AND b.open = '{{' AND size(b.outer) = 0)"
        copied = f"substr({document}, s.begin + 1, s.character + length(t.text) - s.begin)"
        fields = (
            f"CASE WHEN {ends} THEN concat(s.fields, ',', {_quote_member_name('s.kept', names)}, ':', {copied}) "
            f"WHEN {keeps} THEN s.fields "
            f"ELSE {fields} END"
        )
        path_name = (
            f", 'character', s.character + length(t.text), 'begin', if({keeps}, s.character, s.begin), "
            f"'kept', CASE WHEN {ends} THEN CAST(NULL AS STRING) WHEN {keeps} THEN s.name ELSE s.kept END"
        )
    checked = f"({value} OR s.kept IS NOT NULL)" if path_name else value
    if names is None:
        checked = f"({checked} OR ({_OUTERMOST} AND NOT contains(s.want, 'v')))"
    state = (
        f"named_struct('at', s.at + octet_length(t.text), 'want', {want}, 'open', b.open, 'outer', b.outer, "
        f"'name', if({value}, NULL, coalesce(n, s.name)), 'seen', if({value}, concat(s.seen, array(s.name)), s.seen), "
        f"'fields', {fields}, "
        f"'problem', {_build_token_fault(checked, path_name=bool(path_name))}{path_name})"
    )
    return _let("n", found, _let("b", brackets, state))


def _quote_member_name(name: str, names: Sequence[str] | None) -> str:
    """A member's name in JSON; a declared one needs no escapes."""
    return f"to_json(CAST({name} AS VARIANT))" if names is None else f"concat('\"', {name}, '\"')"


def _build_brackets(innermost: str, outer: str) -> str:
    return f"named_struct('open', {innermost}, 'outer', {outer})"


def _build_token_fault(value: str, *, path_name: bool) -> str:
    field = "coalesce(s.name, s.kept, 'name')" if path_name else "s.name"
    half = f"{value} AND t.kind = '\"' AND NOT t.text RLIKE {_quote_raw(_PAIRED + chr(34))}"
    at_half = f"s.at + octet_length(regexp_extract(t.text, {_quote_raw(_PAIRED)}, 0))"
    long = f"{value} AND t.kind = 'v' AND length(t.text) > {_MAX_DIGITS}"
    return (
        f"CASE WHEN instr(s.want, t.kind) = 0 THEN {_build_unexpected_fault('s.want')} "
        "WHEN array_contains(s.seen, n) THEN concat('field ', n, ' occurs twice, again at byte ', s.at) "
        f"WHEN {half} THEN concat('field ', {field}, ' has half of a surrogate pair at byte ', {at_half}) "
        f"WHEN {long} THEN concat('field ', {field}, ' has more than {_MAX_DIGITS:,} digits at byte ', s.at) END"
    )


def _build_unexpected_fault(want: str) -> str:
    expected = "".join(f" WHEN '{kinds}' THEN '{words}'" for kinds, words in _EXPECTED.items())
    return (
        f"if({want} = '', concat('text follows the JSON document at byte ', s.at), "
        f"concat('not JSON: expected ', CASE {want}{expected} END, ' at byte ', s.at))"
    )


def _build_end_fault(rest: str) -> str:
    """The fault of a document whose tokens are sound: no token follows, or the document ends too early."""
    inside = f"regexp_extract({rest}, {_quote_raw('^' + _STRING)}, 0)"
    stop = f"substr({rest}, length({inside}) + 1, 1)"
    at_stop = f"s.at + octet_length({inside})"
    return (
        f"CASE WHEN {rest} = '' THEN CASE WHEN s.want = '' THEN NULL WHEN s.at = 0 THEN 'the value is empty' "
        f"ELSE replace({_build_unexpected_fault('s.want')}, ': expected', ': the document ends, expected') END "
        f"WHEN s.want = '' THEN {_build_unexpected_fault('s.want')} "
        f"WHEN startswith({rest}, '\ufeff') THEN concat('not JSON: a byte order mark at byte ', s.at) "
        f"WHEN {rest} RLIKE '(?i)^[+-]?(nan|inf)' THEN concat('not JSON: NaN or infinity at byte ', s.at) "
        f"WHEN NOT startswith({rest}, '\"') THEN concat('not JSON: unexpected character at byte ', s.at) "
        f"WHEN {stop} = '' THEN concat('not JSON: a string without end begins at byte ', s.at) "
        f"WHEN {stop} = r'\\' THEN concat('not JSON: an unknown escape at byte ', {at_stop}) "
        f"ELSE concat('not JSON: a control character in a string at byte ', {at_stop}) END"
    )
