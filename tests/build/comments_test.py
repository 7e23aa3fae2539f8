"""Lists the comments of the library whose first sentence has no subject and verb, and fails where there is one.

Usage: comments_test.py ROOT   (the project's root)

"Of the rank's own work." and "As above, for one of `late`." are no sentences: the reader has to find what they speak of. Such comments
begin with one of a few words, so only these are looked at: a comment is listed if it begins with one of them and no verb is left beside
its subordinate clauses. The name of a thing ("The ranks of a mesh.", "What a load found.") and a verb without a subject ("Returns …")
are what a reader expects of a declaration, and are not listed. Comments behind code (`///<`) are not looked at either.
"""
import pathlib
import re
import sys

FOLDERS = ("base", "collectives", "offload", "activations", "mesh", "dtensor", "reads", "mixed_precision", "optim", "nn", "fsdp", "parallel", "checkpoint", "data", "plan", "training")
PREPOSITIONS = ("Of|Those|That of|The same|For|With|Without|In|From|On|Between|Over|Inside|At|To|By|Not|Only|Up|Also|Beside|Like|Such|"
                "Neither")
CONJUNCTIONS = "As|Where|When|While|If|Before|After|Until|Once|Since"
OPENER = re.compile(rf"(?:(?P<conjunction>{CONJUNCTIONS})|{PREPOSITIONS})\b")
SUBORDINATE = (r"\b(?:that|which|who|whom|whose|what|where|when|if|because|since|until|while|unless|as|than|before|after|once|whether|"
               r"how|why)\b")
CLAUSE = re.compile(rf"{SUBORDINATE}(?:(?!{SUBORDINATE})[^,;:.])*", re.IGNORECASE)
# Finite verbs of the library's comments. One that is also a noun makes the check miss a comment, and one that lacks here lists it: add it.
VERBS = set("""
is are was were be has have had do does did can cannot may might must will would shall should could need needs accept accepts add adds
admits agree agrees aliases allocates allows answers appear appears apply applies asks assumes attaches averages become becomes begin
begins belong belongs block blocks borrows bring brings broadcasts builds call called calls came carries casts causes changed changes
checks choose chooses clears closes collects combines come comes commits communicates compare compares completes computes connects
contains continues contributes converts copies costs count counts cover covers creates cuts decide decides depend depends derives
describes detaches die dies differ differed differs directs divides doubles draws drives drops end ended ends enters erases exceeds
exchanges excludes exist exists exits expects extends fail failed fails fills finds fires fit fits flattens flushes follow follows forgets
forks forms frees gains gather gathers gave get gets give gives go goes grow grows guards hands hangs happened happens hear hears held
hides hold holds ignores installs interns issues joins keep keeps kept kills knew know knows lack lacks land lands lay learns leave leaves
lends let lets lie lies links list lists listens live lives loads locks look looks loses made make makes maps marks match matches matter
means meet meets mends merges met miss missed misses mix mixes move moves multiplies names normalizes notes observes open opens orders
outlives overlap overlaps overtakes overwrites owns pads pass passes pays permutes places polls posts precedes predicts prefers prefetches
prepares prints profiles publishes puts ran reach reaches read reads receives records reduce reduces refuses registers relies remains
remembers removes renames repeats replaces replicates report reports represents requires reserves resets resolves restores return returned
returns rounds rules run runs said save saves saw say says scales scatters schedules see seems sees send sends sleep sent serves set sets
share shares shuts signals skips sleeps slices slices sorts spares speaks splits stand stands start started starts stay stays steals stood
stops stretches suffices sums survive switches take takes talks tell tells threw throw throws told took touches trains transposes treats
turns unlocks unwraps updates uses validates views visits votes wait waited waits wakes walks want wanted wants warns works wraps write
writes wrote
""".split())


def comments(text):
    """(line, text) of every comment that stands on lines of its own."""
    lines, start, marker = [], 0, None
    for number, line in enumerate([*text.splitlines(), ""], 1):
        match = re.match(r"\s*(///?)(?!<)(?: |$)(.*)", line)
        if lines and (not match or match[1] != marker):
            yield start, "\n".join(lines)
            lines = []
        if match:
            start = start if lines else number
            marker = match[1]
            lines.append(match[2])


def first_sentence(comment):
    """The first sentence, without what stands in parentheses, in quotes or is code."""
    sentence = re.split(r"(?<=[.!?])\s+(?=[A-Z`\"('0-9])|\n\s*\n|\n(?=[-*|])", comment.strip())[0]
    sentence = re.sub(r"`[^`]*`|\"[^\"]*\"", "X", " ".join(sentence.split()))
    return re.sub(r" ?\([^()]*\)", "", sentence)


def verbs(text):
    """How many there are; "has not started" is one."""
    words = [word for word in re.findall(r"[a-z]+", text.lower()) if word not in ("not", "been", "never")]
    return sum(word in VERBS and (i == 0 or words[i - 1] not in VERBS) for i, word in enumerate(words))


def has_main_clause(text):
    """Whether a verb is left beside the subordinate clauses, or one of these has a second: "one that sends all is faster"."""
    return any(verbs(clause) > 1 for clause in CLAUSE.findall(text)) or verbs(CLAUSE.sub(" ", text)) > 0


def is_fragment(sentence):
    """Whether it begins with one of the words above, and has no verb beside its subordinate clauses."""
    opener = OPENER.match(sentence)
    if opener and opener["conjunction"] and "," in sentence:  # "While it lives, nothing is gathered."
        return not has_main_clause(sentence.split(",", maxsplit=1)[1])
    return bool(opener) and not has_main_clause(sentence)


def main():
    root = pathlib.Path(sys.argv[1]).resolve()
    paths = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*")) if path.suffix in (".h", ".cpp")]
    found = [(path, line, first_sentence(text)) for path in paths for line, text in comments(path.read_text())]
    fragments = [f"  {path.relative_to(root)}:{line}: {sentence[:100]}" for path, line, sentence in found if is_fragment(sentence)]
    print(*fragments, sep="\n")
    print(f"{len(fragments)} of {len(found)} comments have no subject and verb in their first sentence")
    sys.exit(1 if fragments else 0)


if __name__ == "__main__":
    main()
