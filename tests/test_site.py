"""The documentation site: it builds, the pages that the code writes are whole, and the notebooks run."""

from __future__ import annotations

import copy
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import replearn
from mkdocs_pages import api_page, operator_card, operators_page

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="mkdocs-material is not installed")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(out)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_the_site_has_every_page_and_links_to_it(site: Path) -> None:
    pages = {page.relative_to(ROOT / "docs").with_suffix(".html") for page in (ROOT / "docs").rglob("*.md")}
    pages |= {Path(name) for name in ("operators.html", "results.html", "api.html")}
    start = (site / "index.html").read_text(encoding="utf-8")
    entries = re.findall(r"^ +- .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(entries) == len(set(entries))
    for page in pages:
        assert (site / page).exists()
        assert f'href="{page.as_posix()}"' in start or page.name == "index.html"


def test_the_site_shows_the_notebooks_with_what_they_print_and_draw(site: Path) -> None:
    page = (site / "notebooks" / "compress_a_network.html").read_text(encoding="utf-8")
    assert "realigned removal" in page
    assert 'src="data:image/png;base64,' in page
    assert "plt.show" in re.sub(r"<[^>]*>", "", page)
    start = (site / "index.html").read_text(encoding="utf-8")
    assert start.count('href="notebooks/compress_a_network.html"') > 1  # in the menu, and in the text
    assert ".ipynb" not in start


def test_every_link_of_the_site_leads_to_a_file_of_it(site: Path) -> None:
    dead = [
        (page.name, link)
        for page in site.rglob("*.html")
        if page.name not in ("404.html", "report.html")
        for link in re.findall(r'<a[^>]+href="([^"#]+)', page.read_text(encoding="utf-8"))
        if not re.match("[a-z]+:", link) and not (page.parent / link).exists()
    ]
    assert dead == []


def test_the_site_loads_nothing_from_the_network(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert re.findall(r"""<(?:script|link|img)[^>]+(?:src|href)=["']https?://[^"']+""", text) == []


@pytest.mark.parametrize("name", replearn.operators.available())
def test_every_operator_has_a_card_with_formula_cost_and_failures(name: str) -> None:
    card = operator_card(replearn.operators.available()[name])
    assert re.search(r"```text\n.*(g\(|theta|W).*=.*\n", card)
    assert "**Cost:**" in card
    assert "**Fails:**" in card
    assert f"`{name}`" in card
    assert card in operators_page()


def test_the_report_of_the_committed_results_is_part_of_the_site(site: Path) -> None:
    summary = (site / "results.html").read_text(encoding="utf-8")
    assert 'href="report.html#t1-resnet32-cifar10"' in summary
    assert len(re.sub(r"<[^>]*>", " ", summary.partition("<article")[2]).split()) < 2_000
    text = (site / "report.html").read_text(encoding="utf-8").replace("<wbr>", "")
    assert "91.87 ± 0.22" in text
    command = "replearn compare t1_resnet32 --data cifar10 --seeds [0-9,-]+ --epochs 100 --methods e2e,removal"
    assert re.search(command, text)
    assert "inference_h200.json" in text
    assert "Does it hold?" in text
    assert "time of a training step / E2E" in text  # the answers in short
    assert "tab:bp_vs_repl_deploy" in text


@pytest.mark.parametrize("name", replearn.__all__)
def test_the_api_page_has_every_public_name(name: str) -> None:
    assert f"## replearn.{name}\n" in api_page()


def test_there_are_two_notebooks_with_their_outputs() -> None:
    """`make notebooks` runs them and stores what comes out."""
    nbformat = pytest.importorskip("nbformat")
    assert len(NOTEBOOKS) == 2
    for path in NOTEBOOKS:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        stored = [output for cell in notebook.cells for output in cell.get("outputs", [])]
        assert stored
        assert all(output.output_type != "error" for output in stored)
        assert "assert" in "".join(cell.source for cell in notebook.cells)


def test_the_notebooks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both in one kernel, which starts and imports torch once; each begins with no names of the other."""
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.v4.new_notebook()
    settings = {"metadata": {"path": str(tmp_path)}}
    for path in NOTEBOOKS:
        notebook.cells += [*nbformat.read(path, as_version=4).cells, nbformat.v4.new_code_cell("%reset -f")]
    stored = copy.deepcopy(notebook.cells)
    for cell in notebook.cells:
        cell.source = cell.source.replace("epochs=10", "epochs=3")
    nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3", resources=settings).execute()
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
    for before, after in zip(stored, notebook.cells, strict=True):
        if "%reset" not in before.source:
            assert words_of(before) == words_of(after), "run `make notebooks`"


def words_of(cell: Any) -> list[str]:
    """The printed lines that no training decides: those without a number, and all of a plan."""
    text = "".join(output.get("text", "") for output in cell.get("outputs", []))
    plan = "print(plan)" in cell.source
    return [line for line in text.splitlines() if plan or not re.search(r"\d", line)]


def test_a_users_own_operator_has_no_card_and_breaks_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from replearn.operators._base import options

    removal = replearn.operators.available()["removal"]
    own = type("Own", (removal,), {"__module__": "__main__", "__doc__": "x"})
    monkeypatch.setattr(options, "registry", {**options.registry, "own": own})
    assert "## Own" not in operators_page()
    assert "## Removal" in operators_page()


@pytest.mark.parametrize("apt", ["exit 100", "echo offline >&2; exit 1"])
def test_ci_goes_on_where_no_browser_can_be_had(apt: str, tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash here")
    for name in ("dirname", "id", "timeout", "true"):
        (tmp_path / name).symlink_to(shutil.which(name) or f"/bin/{name}")
    for name, text in (("apt-get", apt), ("sudo", "exit 1"), ("make", 'echo "made $@"')):
        (tmp_path / name).write_text(f"#!{bash}\n{text}\n")
        (tmp_path / name).chmod(0o755)
    script = [bash, str(ROOT / ".ci" / "run")]
    done = subprocess.run(script, env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "made test\n"), done.stderr
    assert done.stderr == "chromium could not be installed: the browser tests will say so and skip\n"
