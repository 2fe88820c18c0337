"""What README and docs say in code: the examples run, and the excerpts are lines of the files that they name."""

import inspect
import re
import shlex
from itertools import groupby

import pytest
from support import TESTS, needs_compiler, needs_gpu, optional, run_python

import numba_kvcache
from numba_kvcache.layout import plan_store

ROOT = TESTS.parent
README = (ROOT / "README.md").read_text()
PAGES = sorted(path for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")))


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("simulator", ["1", pytest.param("0", marks=needs_gpu)], ids=["simulator", "GPU"])
def test_readme_example(simulator):
    code = blocks(README, "python")[0]
    assert "store_kvcache(" in code
    result = run_python(code, NUMBA_ENABLE_CUDASIM=simulator)
    assert result.returncode == 0, result.stderr


@needs_gpu
def test_readme_compiled_example():
    """The third block, SGLang's, is run by test_sglang.py."""
    optional("torch")
    _, code, drop_in = blocks(README, "python")
    assert "torch.compile" in code
    assert "memory_pool" in drop_in
    result = run_python(code)
    assert result.returncode == 0, result.stderr


@needs_compiler
def test_readme_inspect_commands(capsys):
    from numba_kvcache.__main__ import main

    start = "python -m numba_kvcache "
    commands = [line.removeprefix(start) for line in README.splitlines() if line.startswith(start)]
    assert len(commands) == 2
    for command in commands:
        main(shlex.split(command))
        assert ("EXIT" if "--sass" in command else "registers") in capsys.readouterr().out


def test_readme_sets_up_as_ci_does():
    """The commands, and their order; format, lint and types come between."""
    setup = [command for line in blocks(README, "sh")[0].splitlines() for command in line.split(" && ")]
    ci = (ROOT / ".ci" / "run").read_text().replace(" --quiet", "").splitlines()
    assert setup == [line for line in ci if line in setup]


def excerpts():
    for page in PAGES:
        for block in blocks(page.read_text(), "python"):
            named = re.match(r"# (numba_kvcache/\w+\.py)\n", block)
            if named:
                yield pytest.param(named[1], block[named.end() :], id=f"{page.stem}:{block.splitlines()[1].strip()}")


@pytest.mark.parametrize(("file", "excerpt"), list(excerpts()))
def test_excerpt_is_in_its_file(file, excerpt):
    """Indentation aside; `...` stands for left out lines, between runs that follow one another in the file."""
    source = [line.strip() for line in (ROOT / file).read_text().splitlines()]
    start = 0
    for left_out, run in groupby((line.strip() for line in excerpt.splitlines()), lambda line: line == "..."):
        lines = list(run)
        if left_out:
            continue
        found = [i for i in range(start, len(source)) if source[i : i + len(lines)] == lines]
        assert found, f"{file} has no such lines:\n" + "\n".join(lines)
        start = found[0] + len(lines)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\((?!\w+://)([^)#\s]*)(#[^)\s]*)?\)", page.read_text()):
        other = page.parent / target if target else page
        assert other.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", other.read_text(), re.MULTILINE)
            slugs = [re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings]
            assert anchor[1:] in slugs, target + anchor


# The rows of the layout table: what plan_store is asked, in the table's order.
PLANNED = {
    "128": (128,),
    "200": (200, 0, 0, 8, 8),
    "1,152 (K), 1,024 (V)": (1152, 1024),
    "2,048": (2048,),
    "65,536": (65536,),
    "2,048, `num_split=4`": (2048, 0, 4),
    "8,192, `num_split=1`": (8192, 0, 1),
}


def test_layout_table():
    table = (ROOT / "docs" / "how-it-works.md").read_text().split("| groups per block |\n")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[1:]]
    assert [row[0] for row in rows] == list(PLANNED)
    for name, *cells in rows:
        layout = plan_store(*PLANNED[name])
        idle = f" (and {layout.idle_threads} threads idle)" if layout.idle_threads else ""
        assert layout.k.loops == layout.v.loops
        assert layout.k.vector_bytes == layout.v.vector_bytes
        assert cells == [
            f"{layout.k.vector_bytes} B", f"{layout.threads}", f"{layout.k.loops}", f"{layout.parts}",
            f"{layout.steps}", f"{layout.groups}{idle}",
        ], name  # fmt: skip


@pytest.mark.parametrize("function", ["store_kvcache", "store_kvcache_fp8", "warmup"])
def test_readme_gives_signatures_as_they_are(function):
    """Without their annotations."""
    signature = inspect.signature(getattr(numba_kvcache, function))
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    stated = str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))
    text = re.sub(r"\s+", " ", README).replace("( ", "(").replace(" )", ")")
    assert f"{function}{stated}".replace("'", '"') in text


def test_readme_names_every_variable():
    settings = (ROOT / "numba_kvcache" / "settings.py").read_text()
    read = set(re.findall(r"os\.environ\.get\(\"(NUMBA_KVCACHE_\w+)\"", settings))
    assert read
    assert read == set(re.findall(r"NUMBA_KVCACHE_\w+", README))


@pytest.mark.parametrize("document", sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]), ids=lambda p: p.name)
def test_no_figure_waits_to_be_filled(document):
    assert "{{" not in document.read_text()
