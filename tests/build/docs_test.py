"""What the documentation names exists: linked files and headings, sources, functions, scripts, commits, environment variables."""
import pathlib
import re
import shutil
import subprocess
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("*/README.md"))]
LIBRARY = ["base", "collectives", "offload", "activations", "mesh", "dtensor", "reads", "mixed_precision", "optim", "nn", "fsdp", "parallel", "checkpoint", "data", "plan", "training"]
MECHANISM = [ROOT / "docs/architecture.md", ROOT / "docs/dtensor_internals.md", *(page for folder in LIBRARY for page in ROOT.glob(f"{folder}/README.md"))]
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


def included(headers):
    return {name for header in headers for name in re.findall(r"^#include <tessera/([^>]+)>", (ROOT / header).read_text(), flags=re.MULTILINE)}


def public_headers(door):
    """A header, and those that it includes, directly or not."""
    found, new = set(), {door}
    while new:
        found |= new
        new = included(new) - found
    return found


def has_history():
    return (ROOT / ".git").exists() and shutil.which("git") and git("rev-parse", "--is-shallow-repository").strip() == "false"


class Docs(unittest.TestCase):
    def assert_none(self, missing, what):
        self.assertEqual(sorted(set(missing)), [], what)

    def test_tests_of_complaints_exist(self):
        named = re.findall(r"`(\w+)\.([A-Z]\w+)`", (ROOT / "docs/complaints.md").read_text())
        there = {test for path in sources(["tests"], (".cpp",))
                 for test in re.findall(r"^(?:TYPED_)?TEST(?:_[FP])?\((\w+),\s*(\w+)\)", path.read_text(), flags=re.MULTILINE)}
        self.assertGreater(len(named), 20)
        self.assert_none([".".join(test) for test in named if test not in there], "tests that do not exist")

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
        named = {commit for page in PAGES for commit in re.findall(r"\b(?=\d*[a-f])(?=[a-f]*\d)[0-9a-f]{7}\b", prose(page))}
        self.assertGreater(len(named), 20)
        known = git("cat-file", "--batch-check", text="".join(f"{commit}^{{commit}}\n" for commit in sorted(named))).splitlines()
        self.assert_none([line for line in known if line.endswith("missing")], "the pages name commits that do not exist")

    def test_every_result_has_a_commit(self):
        rows = [line for line in (ROOT / "docs/results.md").read_text().splitlines() if line.startswith("|") and "`" in line]
        self.assertGreater(len(rows), 20)
        self.assert_none([row for row in rows if not re.search(r"\b[0-9a-f]{7}\b", row.split("|")[-2])], "results without a commit")

    def test_files_of_tests_exist_and_are_run(self):
        run = "".join(path.read_text() for path in [*ROOT.glob("tests/**/CMakeLists.txt"), *(ROOT / "scripts").iterdir()] if path.is_file())
        named = [(page, name) for page in PAGES for name in re.findall(r"\btests/[\w/]+\.(?:cpp|py|h)\b", page.read_text())]
        self.assertGreater(len(named), 10)
        self.assert_none([f"{page.name}: {name}" for page, name in named if not (ROOT / name).exists()], "files that do not exist")
        self.assert_none([f"{page.name}: {name}" for page, name in named if not name.endswith((".h", "_test.cpp")) and pathlib.Path(name).name not in run],
                         "files that nothing builds or runs") # every_test_is_registered looks for *_test.cpp

    def test_scripts_exist(self):
        named = [(page, name) for page in PAGES for name in re.findall(r"\b(?:scripts|benchmarks)/[a-z-]+\b(?![/.\w])", page.read_text())]
        self.assert_none([f"{page.name}: {name}" for page, name in named if not (ROOT / name).exists()], "commands that do not exist")

    def test_the_readme_lists_every_door(self):
        rows = dict(re.findall(r"^\| `tessera/(\w+\.h)` \| (.*?) \|", (ROOT / "README.md").read_text(), flags=re.MULTILINE))
        self.assertEqual(sorted(rows), sorted(path.name for path in ROOT.glob("*.h")), "README.md's table, and the headers of the root")
        self.assertEqual(sorted(rows), sorted([*included(["tessera.h"]), "tessera.h"]), "README.md's table, and what tessera.h includes")
        for door, row in rows.items():
            words = set(re.findall(r"\w+", "\n".join((ROOT / header).read_text() for header in public_headers(door))))
            self.assert_none(set(re.findall(r"`(\w+)`", row)) - words, f"README.md names what is not behind {door}")

    def test_the_list_of_headers_is_complete(self):
        page = (ROOT / "docs/headers.md").read_text()
        listed = re.findall(r"`tessera/([\w/]+\.h)`", page)
        internal = {header for header in public_headers("tessera.h") if "\n// Internal" in (ROOT / header).read_text()}
        self.assertEqual(sorted(listed), sorted(public_headers("tessera.h") - internal - {path.name for path in ROOT.glob("*.h")}),
                         "docs/headers.md, and the public headers")
        for door, section in re.findall(r"^## (\w+\.h)\n(.*?)(?=^## |\Z)", page, flags=re.MULTILINE | re.DOTALL):
            self.assert_none(set(re.findall(r"`tessera/([\w/]+\.h)`", section)) - public_headers(door), f"headers that {door} does not include")
        words = set(re.findall(r"\w+", "\n".join((ROOT / header).read_text() for header in listed)))
        self.assert_none(set(re.findall(r"`(\w+)`", page)) - words, "docs/headers.md names what no public header has")

    def test_files_of_the_mechanism_exist(self):
        for page in MECHANISM:
            text = re.sub(r"\]\([^)]*\)", "", prose(page))
            names = re.findall(r"(?<![\w/])[a-z_]+(?:/[a-z_]+)+\.(?:cpp|h|md)\b", text)
            names += [f"{name}.*" for row in re.findall(r"^\| (`[^|]+) \|", text, flags=re.MULTILINE) for name in re.findall(r"`(\w+/\w+)`", row)]
            self.assert_none([name for name in names if not [*ROOT.glob(name), *page.parent.glob(name)]], f"{page} names files that do not exist")

    def test_names_of_the_mechanism_exist(self):
        known = set(re.findall(r"\w+", "\n".join(path.read_text() for path in sources([*LIBRARY, "python"]))))
        known |= {word for path in sources(LIBRARY) for word in path.relative_to(ROOT).with_suffix("").parts} | set(PROGRAMS)
        for page in MECHANISM:
            named = [code for code in re.findall(r"`([^`\n]+)`", prose(page)) if re.fullmatch(r"~?[\w:/]+(\(.*\))?", code)]
            words = [word for code in named for word in re.findall(r"[A-Za-z_]\w+", re.sub(r"\(.*", "", code))]
            self.assert_none([word for word in words if word not in known], f"{page} names what no source has")

    def test_tests_beside_fsdp2s_exist(self):
        text = "\n".join(path.read_text() for path in sources(["tests"]))
        known = {f"{suite}.{name}" for suite, name in re.findall(r"^TEST(?:_[FP])?\((\w+), (\w+)\)", text, flags=re.MULTILINE)}
        known |= {f"equivalence: {name}" for name in re.findall(r'equivalence_case<.*?>\("(\w+)"\)', text)}
        parity = (ROOT / "tests/fsdp/training/python_parity_test.cpp").read_text()
        known |= {f"parity: {name}" for name in re.findall(r'\.name = "([^"]+)"', parity)}
        rows = [line for line in (ROOT / "docs/fsdp2_tests.md").read_text().splitlines() if line.startswith("| ")]
        named = [name for row in rows for name in re.findall(r"`([A-Z]\w*\.[A-Z]\w+|(?:equivalence|parity): [^`]+)`", row)]
        self.assertGreater(len(named), 100)
        self.assert_none([name for name in named if name not in known], "docs/fsdp2_tests.md names tests that do not exist")
        self.assert_none([row for row in rows if " none" not in row and "`" not in row and "every" not in row and "FSDP2: " not in row
                          and "PyTorch: " not in row], "docs/fsdp2_tests.md has rows without a test or a reason")

    def test_tests_beside_fsdp2s_run_where_the_page_says(self):
        there = self.simulated_tests()
        rows = [line for line in (ROOT / "docs/fsdp2_tests.md").read_text().splitlines() if line.startswith("| ")]
        claims = re.findall(r"`([A-Z]\w*\.[A-Z]\w+)`,? on the simulated device", "\n".join(rows))
        self.assertGreater(len(claims), 3)
        self.assert_none([name for name in claims if name not in there], "tests that no entry runs on the simulated device")

    def simulated_tests(self):
        """`Suite.Name` of the files that a tessera_test with SIMULATED_RANKS runs, or that use the device by themselves."""
        names = set()
        for listing in ROOT.glob("tests/**/CMakeLists.txt"):
            for entry, words in re.findall(r"tessera_test\((\S+)([^)]*)\)", listing.read_text()):
                files = re.search(r"FILES ([a-z_\s]+)", words)
                places = set(files[1].split() if files else entry.split(".")[1:2])
                for source in listing.parent.rglob("*_test.cpp"):
                    text = source.read_text()
                    if places & {source.stem, *source.parts} and ("SIMULATED_RANKS" in words or "sim::" in text):
                        names |= {f"{suite}.{name}" for suite, name in re.findall(r"^TEST(?:_[FP])?\((\w+), (\w+)\)", text, flags=re.MULTILINE)}
        return names

    def test_the_table_of_dtypes_has_a_measurement_of_each_column(self):
        text = (ROOT / "docs/mixed_precision.md").read_text()
        rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
        table = [cells for cells in rows if len(cells) == 4]
        self.assertEqual([cell.strip() for cell in table[0]], ["tensor", "called directly", "with `tessera::call`", "FSDP2"])
        measured = (ROOT / "tests/fsdp/reads/boundaries_test.cpp").read_text(), (ROOT / "tests/fsdp/fsdp2_dtypes.py").read_text()
        self.assert_none([cells[0] for cells in table[1:] for source, cell in zip(measured, cells[2:])
                          if "(none)" not in cell and re.sub("^.*: ", "", cells[0].strip()) not in source], "rows that no test measures")

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
