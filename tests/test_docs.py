"""The documentation keeps its word: its Python blocks run, their outputs are right, links and make targets exist.

The blocks fenced with ```python in README.md, CONTRIBUTING.md and docs/*.md run in order, each file in one fresh
process (the pages of docs/ops share one) on the host substrate, and once more on cuda where the tests run on cuda. A
```text block that follows a Python block is what the block prints, compared on host. A block that cannot run says why:
```python notest: the reason.

To run one file by hand: ``python tests/test_docs.py docs/quickstart.md``.
"""

import contextlib
import dataclasses
import difflib
import inspect
import io
import os
import pathlib
import re
import subprocess
import sys
import textwrap

import pytest
import torch_quartz

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "csrc").rglob("*.md")])
NOT_RUN = re.compile(r"python notest: (.{10,})")
FOLDERS = "csrc|torch_ext|python|tests|examples|scripts|docs|cmake"
PACKAGE = pathlib.Path(torch_quartz.__file__).resolve().parents[1]


@dataclasses.dataclass
class Block:
    """A fenced block of a page: its info string, the number of its first line, its text, and the output it promises."""

    info: str
    line: int
    text: str
    output: str | None = None

    def runs(self) -> bool:
        return self.info == "python"


def blocks(page: pathlib.Path) -> list[Block]:
    """Return the fenced blocks of a page in their order; a ```text block after a Python block is that one's output."""
    found: list[Block] = []
    follows = False  # only blank lines since the last fence
    lines = enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
    for number, line in lines:
        opening = re.fullmatch(r" *(`{3,})(.*)", line)
        if not opening:
            follows = follows and not line.strip()
            continue
        fence, info = opening[1], opening[2].strip()
        body = []
        for _, inner in lines:
            if inner.strip() == fence:
                break
            body.append(inner)
        else:
            raise ValueError(f"{page.name}:{number}: the block is not closed")
        text = textwrap.dedent("\n".join(body)) + "\n"
        if info == "text" and follows and found[-1].runs():
            found[-1].output = text
        else:
            found.append(Block(info, number + 1, text))
        follows = True
    return found


def run_page(page: pathlib.Path) -> None:
    """Run the Python blocks of a page in this process, one after the other in one namespace."""
    names = {"__name__": "__main__"}
    for block in blocks(page):
        if not block.runs():
            continue
        printed = io.StringIO()
        code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")  # tracebacks show the page's lines
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        if block.output is not None and torch_quartz._C.substrate() == "host":
            compare(page, block, printed.getvalue())


def compare(page: pathlib.Path, block: Block, printed: str) -> None:
    """Raise AssertionError with the difference unless the block printed what the page says."""
    promised, got = ([line.rstrip() for line in text.strip().splitlines()] for text in (block.output, printed))
    if promised != got:
        difference = "\n".join(difflib.unified_diff(promised, got, "the page", "printed", lineterm=""))
        raise AssertionError(f"{page.name}:{block.line}: another output than the page's\n{difference}")


def name(page: pathlib.Path) -> str:
    return page.relative_to(ROOT).as_posix()


OPERATORS = [page for page in PAGES if page.parent == ROOT / "docs" / "ops"]
OTHERS = [page for page in PAGES if page not in OPERATORS and any(block.runs() for block in blocks(page))]
# The pages of operators are many and short: they share a process, not their names.
PROCESSES = {"docs/ops": OPERATORS} | {name(page): [page] for page in OTHERS}


@pytest.mark.parametrize("substrate", sorted({"host", torch_quartz._C.substrate()}))
@pytest.mark.parametrize("pages", PROCESSES.values(), ids=PROCESSES)
def test_python_blocks_run(pages, substrate, tmp_path):
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(PACKAGE), os.environ.get("PYTHONPATH")])),
        "TORCH_QUARTZ_SUBSTRATE": substrate,
        "TORCH_QUARTZ_HOST_DEVICES": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, str(pathlib.Path(__file__).resolve()), *map(str, pages)],
        cwd=tmp_path,  # blocks may write files
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_python_blocks_are_run_or_say_why_not(page):
    for block in blocks(page):
        if block.info.startswith("python"):
            assert block.runs() or NOT_RUN.fullmatch(block.info), f"{name(page)}:{block.line}: ```{block.info}"


def test_readme_starts_with_the_two_commands():
    start = "\n".join((ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:40])
    assert re.search(r"^make demo\b", start, re.MULTILINE) and re.search(r"^make test\b", start, re.MULTILINE)


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    for page in PAGES:
        commands = "".join(block.text for block in blocks(page) if block.info in ("", "bash"))
        named = set(
            re.findall(r"^make ([a-z]+)\b", commands, re.MULTILINE) + re.findall(r"`make ([a-z]+)\b", prose(page))
        )
        assert named <= targets, f"{name(page)} names make targets that do not exist: {sorted(named - targets)}"


def prose(page: pathlib.Path) -> str:
    return re.sub(r"^ *(`{3,}).*?^ *\1$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: pathlib.Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue  # of the outside world
        path, _, anchor = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert other.exists(), f"{name(page)} links to {target}, which does not exist"
        assert not anchor or anchor in anchors(other), f"{name(page)} links to {target}, which has no such heading"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_named_files_exist(page):
    for path in set(re.findall(rf"`((?:{FOLDERS})/[\w./-]+)`", prose(page))):
        assert (ROOT / path).exists(), f"{name(page)} names {path}, which does not exist"


def signature(function) -> str:
    """Return the call of a function of `torch_quartz.ops` as its page shows it."""
    parts = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}".replace("'", '"')
        parts.append(parameter.name + default)
    return f"torch_quartz.ops.{function.__name__}({', '.join(parts)})"


@pytest.mark.parametrize("page", OPERATORS, ids=name)
def test_pages_of_operators_have_an_example(page):
    assert any(block.runs() for block in blocks(page))


def test_every_operator_has_a_page_with_its_signature():
    shown = re.sub(r"\s+", " ", "".join(block.text for page in OPERATORS for block in blocks(page)))
    functions = {getattr(torch_quartz.ops, entry) for entry in torch_quartz.ops.__all__}
    for call in map(signature, filter(inspect.isfunction, functions)):
        assert call in shown, f"no page of docs/ops has {call}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_named_tests_exist(page):
    for path, test in set(re.findall(r"`(tests/[\w./-]+\.py)::(\w+)`", prose(page))):
        found = (ROOT / path).exists() and re.search(rf"^def {test}\(", (ROOT / path).read_text(), re.MULTILINE)
        assert found, f"{name(page)} names {path}::{test}, which does not exist"


if __name__ == "__main__":
    for path in sys.argv[1:]:
        run_page(pathlib.Path(path).resolve())
