"""What the documentation names exists: linked files and headings, sources, functions, scripts, commits, environment variables."""
import pathlib
import re
import shutil
import subprocess
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("*/README.md"))]
LIBRARY = ["collectives", "offload", "activations", "mesh", "dtensor", "mixed_precision", "optim", "nn", "fsdp", "checkpoint", "training"]
ARCHITECTURE = ROOT / "docs/architecture.md"
PROGRAMS = [*LIBRARY, "python", "examples", "benchmarks", "tools", "tests"]


def sources(folders, suffixes=(".h", ".cpp")):
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*")) if path.suffix in suffixes]


def prose(page):
    """A page without its blocks of code."""
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def anchors(page):
    """What links to a page's headings end with, as GitHub makes it."""
    headings = re.findall(r"^#+ +(.+)$", prose(page), flags=re.MULTILINE)
    texts = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    slugs = [re.sub(r"[^\w -]", "", text).replace(" ", "-") for text in texts]
    return [f"{slug}-{earlier}" if (earlier := slugs[:i].count(slug)) else slug for i, slug in enumerate(slugs)]


def git(*arguments, text=None):
    return subprocess.run(["git", *arguments], cwd=ROOT, input=text, capture_output=True, text=True).stdout


def has_history():
    return (ROOT / ".git").exists() and shutil.which("git") and git("rev-parse", "--is-shallow-repository").strip() == "false"


class Docs(unittest.TestCase):
    def assert_none(self, missing, what):
        self.assertEqual(sorted(set(missing)), [], what)

    def test_links_lead_to_files(self):
        links = [(page, target) for page in PAGES for target in re.findall(r"\]\(([^)#]+)[^)]*\)", prose(page))]
        self.assert_none([f"{page.name}: {target}" for page, target in links
                          if not target.startswith("http") and not (page.parent / target).exists()], "links to files that do not exist")

    def test_links_lead_to_headings(self):
        links = [(page, *link) for page in PAGES for link in re.findall(r"\]\(([^)#]*)#([^)]+)\)", prose(page))]
        pages = [(page, page if not target else (page.parent / target).resolve(), anchor) for page, target, anchor in links
                 if not target.startswith("http")]
        self.assertGreater(len(pages), 20)
        self.assert_none([f"{page.name}: {target.name}#{anchor}" for page, target, anchor in pages
                          if target.suffix == ".md" and target.exists() and anchor not in anchors(target)],
                         "links to headings that do not exist")

    @unittest.skipUnless(has_history(), "no history")
    def test_commits_of_the_results_exist(self):
        rows = [line for line in (ROOT / "docs/results.md").read_text().splitlines() if line.startswith("|")]
        named = sorted({commit for row in rows for commit in re.findall(r"\b[0-9a-f]{7}\b", row.split("|")[-2])})
        self.assertGreater(len(named), 20)
        known = git("cat-file", "--batch-check", text="".join(f"{commit}^{{commit}}\n" for commit in named)).splitlines()
        self.assert_none([line for line in known if line.endswith("missing")], "docs/results.md names commits that do not exist")

    def test_scripts_exist(self):
        named = [(page, name) for page in PAGES for name in re.findall(r"\b(?:scripts|benchmarks)/[a-z-]+\b(?![/.\w])", page.read_text())]
        self.assert_none([f"{page.name}: {name}" for page, name in named if not (ROOT / name).exists()], "commands that do not exist")

    def test_the_readme_lists_every_public_header(self):
        headers = re.findall(r"<tessera/[a-z_]+/([a-z_]+\.h)>", (ROOT / "tessera.h").read_text())
        text = (ROOT / "README.md").read_text()
        self.assert_none([header for header in headers if not re.search(rf"[/`]{header}`", text)], "headers that README.md lacks")

    def test_files_of_the_architecture_exist(self):
        names = re.findall(r"\b[a-z_]+(?:/[a-z_]+)+\.(?:cpp|h|md)\b", ARCHITECTURE.read_text())
        self.assert_none([name for name in names if not (ROOT / name).exists()], "docs/architecture.md names files that do not exist")

    def test_names_of_the_architecture_exist(self):
        known = set(re.findall(r"\w+", "\n".join(path.read_text() for path in sources([*LIBRARY, "python"]))))
        known |= {path.stem for path in sources(LIBRARY)} | set(PROGRAMS)
        named = [code for code in re.findall(r"`([^`\n]+)`", prose(ARCHITECTURE)) if re.fullmatch(r"~?[\w:/]+(\(.*\))?", code)]
        words = [word for code in named for word in re.findall(r"[A-Za-z_]\w+", re.sub(r"\(.*", "", code))]
        self.assert_none([word for word in words if word not in known], "docs/architecture.md names what no source has")

    def test_tests_beside_fsdp2s_exist(self):
        text = "\n".join(path.read_text() for path in sources(["tests"]))
        known = {f"{suite}.{name}" for suite, name in re.findall(r"^TEST(?:_[FP])?\((\w+), (\w+)\)", text, flags=re.MULTILINE)}
        known |= {f"holds: {name}" for name in re.findall(r'holds_case<.*?>\("(\w+)"\)', text)}
        parity = (ROOT / "tests/fsdp/python_parity_test.cpp").read_text()
        known |= {f"parity: {name}" for name in re.findall(r'\.name = "([^"]+)"', parity)}
        rows = [line for line in (ROOT / "docs/fsdp2_tests.md").read_text().splitlines() if line.startswith("| ")]
        named = [name for row in rows for name in re.findall(r"`([A-Z]\w*\.[A-Z]\w+|(?:holds|parity): [^`]+)`", row)]
        self.assertGreater(len(named), 100)
        self.assert_none([name for name in named if name not in known], "docs/fsdp2_tests.md names tests that do not exist")
        self.assert_none([row for row in rows if " none" not in row and "`" not in row and "every" not in row and "FSDP2: " not in row
                          and "PyTorch: " not in row], "docs/fsdp2_tests.md has rows without a test or a reason")

    def test_every_environment_variable_is_in_the_table(self):
        call = r"(?:getenv|environ\.get|environment\.(?:get|find)|text|integer)\(\s*"
        read = [name for path in sources(PROGRAMS, (".h", ".cpp", ".py")) for name in re.findall(call + r'"([A-Z_]+)"', path.read_text())
                if name.startswith("TESSERA_") or not path.is_relative_to(ROOT / "tests")]  # tests talk to programs of their own
        for script in sorted((ROOT / "scripts").iterdir()):
            read += re.findall(r'environ\.get\("([A-Z_]+)"', script.read_text()) + re.findall(r"\$\{([A-Z_]+):-", script.read_text())
        listed = {name for line in (ROOT / "docs/environment.md").read_text().splitlines() if line.startswith("|")
                  for name in re.findall(r"`([A-Z_]+)`", line)}
        self.assertGreater(len(set(read)), 20)
        self.assert_none(set(read) - listed, "docs/environment.md lacks variables that are read")
        scripts = [path for path in (ROOT / "scripts").iterdir() if path.is_file()]
        text = "".join(path.read_text() for path in [*sources(PROGRAMS, (".h", ".cpp", ".py", ".txt")), *scripts])
        self.assert_none({name for name in listed if name not in text}, "docs/environment.md lists variables that nothing reads")


if __name__ == "__main__":
    unittest.main()
