"""The page without a browser: what is in it, and that nothing in a journal can break out."""

import json
import re
from html.parser import HTMLParser

import pytest

from heal.report.collect import read_run
from heal.report.page import SCRIPTS, _web, make_page
from tests.report.journals import act, postmortem, sick_run, started, trouble, write

HOSTILE = (
    "</script><script>alert(1)</script><!--<script>",
    '"><img src=x onerror=alert(1)>',
    "&lt;b&gt; ${title} $policy {{x}}",
    "\u2028\u2029\u202e\ud800\x00\x1b[31m",
    "' onmouseover='alert(1)",
)


class Outline(HTMLParser):
    """Tags, attributes and the texts of scripts, as a browser would see them."""

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.tags, self.scripts, self.text, self._in = [], [], "", ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._in = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._in = ""

    def handle_data(self, data):
        if self._in == "script":
            self.scripts[-1] += data
        elif self._in != "style":
            self.text += data


def hostile_run(folder):
    events = [started(host=HOSTILE[0], **{HOSTILE[1]: HOSTILE[2]}, settings={HOSTILE[0]: 1})]
    for i, text in enumerate(HOSTILE):
        evidence = {"tensor": text, "message": text, text: text}
        told = {"diagnosis": text, "reference": text, "evidence": evidence}
        events.append(trouble("data_error", 20 * i, act(text, reason=text), **told))
        events.append(trouble(text, 20 * i, act("Halt", reason=text), **told))
        events.append({**trouble("x", i), "event": text, "text": text})
    write(folder / "events.jsonl", events)
    postmortem(folder, exit_reason=HOSTILE[0], exception_message=HOSTILE[0])
    return folder


def test_a_hostile_journal_stays_text(tmp_path):
    page = make_page(read_run(hostile_run(tmp_path / HOSTILE[1].replace("/", ""))))
    page.encode("utf-8")
    outline = Outline(page)
    tags = [tag for tag, _ in outline.tags]
    assert tags.count("script") == len(outline.scripts) == 2
    assert "img" not in tags
    assert not [a for _, attributes in outline.tags for a in attributes if a.startswith("on")]
    after = page.partition('<script type="application/json" id="data">')[2]
    data = json.loads(after.partition("<")[0])  # not one opening bracket before its own end
    assert HOSTILE[0] in data["incidents"][0]["cause"]
    assert HOSTILE[0] in outline.text
    assert not set("\x1b\x00\u202e\u2028") & set(outline.text)


def test_only_our_script_and_style_may_run_and_nothing_is_fetched(tmp_path):
    page = make_page(read_run(sick_run(tmp_path)))
    outline = Outline(page)
    (policy,) = [a["content"] for _, a in outline.tags if "http-equiv" in a]
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page)
    links = [a for _, attributes in outline.tags for a in attributes if a in ("src", "srcset")]
    assert not links
    assert all(a["href"].startswith("#") for _, a in outline.tags if "href" in a)


def test_the_page_tells_everything_without_a_script(tmp_path):
    text = Outline(make_page(read_run(sick_run(tmp_path, ranks=2)))).text
    for told in (
        "3 incidents: 1 rolled back (loss not checked), 1 skipped on the device",
        "The loss was NaN or Inf",
        "rolled back to the snapshot of step 40",
        "20 steps",
        "layer.weight",
        "node0, node1",
        "lag = 1",
        "confidence 90%",
        "completed",
    ):
        assert told in text, told


def test_damage_is_told_on_the_page(tmp_path):
    sick_run(tmp_path)
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write('{"torn')
    assert "events.jsonl: 1 line could not be read." in make_page(read_run(tmp_path))


def test_headings_tables_and_controls_have_names(tmp_path):
    outline = Outline(make_page(read_run(sick_run(tmp_path))))
    tags = outline.tags
    labelled = {a["aria-labelledby"] for tag, a in tags if tag == "section"}
    assert labelled <= {a.get("id") for _, a in tags}
    assert ("html", {"lang": "en", "data-theme": "auto"}) in tags
    names = [tag for tag, _ in tags]
    assert names.count("caption") == names.count("table") > 0
    assert all("aria-label" in a for tag, a in tags if tag == "svg")
    assert all(a.get("scope") == "col" for tag, a in tags if tag == "th")
    ids = [a["id"] for _, a in tags if "id" in a]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_can_be_chosen_where_there_are_several(tmp_path, ranks):
    tags = Outline(make_page(read_run(sick_run(tmp_path, ranks)))).tags
    (label,) = [a for tag, a in tags if tag == "label" and a.get("class") == "field"]
    assert ("hidden" in label) == (ranks == 1)


def test_a_run_with_nothing_but_an_ending_has_a_page(tmp_path):
    postmortem(tmp_path)
    text = Outline(make_page(read_run(tmp_path))).text
    assert "Healing changed nothing in this run." in text
    assert "3.11.7" in text


@pytest.mark.parametrize("name", [*SCRIPTS, "report.css", "page.html"])
def test_the_parts_of_the_page_hold_no_emoji_and_no_address(name):
    source = _web(name)
    assert all(ord(c) < 0x2190 for c in source)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", source)
