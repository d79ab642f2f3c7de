"""What a notebook shows of torchrelay.report()."""

from __future__ import annotations

from html.parser import HTMLParser

from torchrelay.compiler.api.runs import GraphRecord, Report

EVIL = '<script>alert(1)</script>&"'


class Tables(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.cells: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)
        if tag == "td":
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        self.cells[-1] += data


def test_counts_and_graphs_are_tables_whatever_their_texts_are() -> None:
    graphs = tuple(
        GraphRecord(key=f"{number:064x}"[::-1], outcome="fallback", seconds=1.5, nodes=4000, reason=EVIL)
        for number in range(60)
    )
    tables = Tables(Report(hits=3, fallbacks={EVIL: 2}, graphs=graphs)._repr_html_())
    assert tables.tags == {"table", "tr", "td"}
    assert tables.cells[:4] == ["hits", "3", "fallbacks", f"{EVIL} 2"]
    assert tables.cells[4:8] == ["graph", "what became of it", "nodes", "seconds"]
    assert tables.cells[-4:] == [graphs[-1].key[:12], f"compiled locally: {EVIL}", "4,000", "1.50"]
    assert len(tables.cells) == 8 + 4 * 50


def test_a_process_that_compiled_nothing() -> None:
    assert Tables(Report()._repr_html_()).cells == ["graph", "what became of it", "nodes", "seconds"]
