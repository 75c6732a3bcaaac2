"""What `warmd run` and `warmd chat` stream to a terminal: lines end between words."""

from hypothesis import given, strategies as st

from warmd.cli.view.wrap import WordWrap


def wrapped(text: str, width: int, *, piece: int = 3) -> list[str]:
    wrap = WordWrap(lambda: width)
    pieces = [text[i : i + piece] for i in range(0, len(text), piece)]
    return ("".join(map(wrap.feed, pieces)) + wrap.flush()).split("\n")


def test_lines_end_between_words_however_the_text_is_streamed():
    text = "The quick brown fox jumps over the lazy dog."
    for piece in (1, 3, 100):
        assert wrapped(text, 16, piece=piece) == [
            "The quick brown",
            "fox jumps over",
            "the lazy dog.",
        ]


def test_line_breaks_and_indentation_of_the_text_are_kept():
    text = "def f(x):\n    return x + 1\n\n\tdone"
    assert wrapped(text, 40) == ["def f(x):", "    return x + 1", "", "\tdone"]


def test_a_word_longer_than_a_line_is_broken_by_the_terminal():
    assert wrapped("see " + "x" * 25 + " end", 10) == ["see", "x" * 25 + " end"]


def test_a_tab_at_the_end_takes_no_line_beyond_the_width():
    assert wrapped("a a\t", 4) == ["a a"]


def test_chinese_text_is_streamed_at_once_and_wrapped_by_its_width_on_the_terminal():
    wrap = WordWrap(lambda: 8)
    assert wrap.feed("一二三") == "一二三"
    assert wrap.feed("四五") == "四\n五"


def test_a_complete_word_is_shown_before_the_next_one_comes():
    wrap = WordWrap(lambda: 80)
    assert wrap.feed("un") == ""
    assert wrap.feed("usual ") == "unusual"
    assert wrap.feed("end") == ""
    assert wrap.flush() == " end"


def test_a_resized_terminal_counts_from_the_next_word_on():
    columns = [80]
    wrap = WordWrap(lambda: columns[0])
    assert wrap.feed("a b c d e f ") == "a b c d e f"
    columns[0] = 10
    assert wrap.feed("g ") == "\ng"


@given(st.text("ab \n\té一", max_size=200), st.integers(4, 30), st.integers(1, 9))
def test_no_character_is_lost_but_spaces_at_line_ends_and_no_line_is_too_long(text, width, piece):
    lines = wrapped(text, width, piece=piece)
    assert "".join("".join(lines).split()) == "".join(text.split())
    for line in lines:
        words = line.split()
        if len(words) > 1 and max(map(len, words)) < width and line.isascii():
            assert len(line.expandtabs()) <= width
