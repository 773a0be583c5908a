"""Reading LibreOffice help pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from paddlenlp_nebula.data.help_pages import Block, is_sentence, read_blocks, read_page


@pytest.mark.parametrize(
    ("html", "expected"),
    [
        ('<p id="a">One\n   <b>two</b> three.</p>', [("a", "One two three.")]),
        ('<h2 id="h"><a name="x"></a>Title</h2><p id="p">Text</p>', [("h", "Title"), ("p", "Text")]),
        ('<p><a name="inner"></a>Keyed by its anchor</p>', [("inner", "Keyed by its anchor")]),
        ("<p>No id</p>", []),
        ('<p id="empty"> <img src="x.svg"> </p>', []),
        ('<p id="e">Fish &amp; chips &lt;now&gt;</p>', [("e", "Fish & chips <now>")]),
        ('<p id="b">Left<br>right</p>', [("b", "Left right")]),
        ('<p id="u">Unclosed<p id="v">Next</p>', [("u", "Unclosed"), ("v", "Next")]),
        (
            '<p id="m">Choose <span class="MAC"><span class="emph">Preferences</span></span>'
            '<span class="UNIX">Tools</span>.</p>',
            [("m", "Choose Tools.")],
        ),
    ],
)
def test_blocks_of_a_page(html: str, expected: list[tuple[str, str]]) -> None:
    assert read_page(f"<html><body><div>{html}</div></body></html>") == expected


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("Too few words.", False),
        ("This has four words.", True),
        ("No stop at the end", False),
        ("word " * 59 + "end.", True),
        ("word " * 60 + "end.", False),
        ("Which one do you want?", True),
    ],
)
def test_what_counts_as_a_sentence(text: str, sentence: bool) -> None:
    assert is_sentence(text) is sentence


def test_pages_are_read_in_name_order(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "page.html").write_text(f'<p id="k">{name}</p>', encoding="utf-8")
    assert list(read_blocks(tmp_path)) == [Block("a/page.html", "k", "a"), Block("b/page.html", "k", "b")]
