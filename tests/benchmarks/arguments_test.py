"""What the programs that measure say of arguments that they cannot use. The arguments are the programs' folder, and unittest's."""
import json
import pathlib
import subprocess
import sys
import unittest

FOLDER = pathlib.Path(sys.argv[1]).resolve()


def run(program, *arguments):
    return subprocess.run([FOLDER / program, *arguments], capture_output=True, text=True, timeout=120)


class Arguments(unittest.TestCase):
    def assert_errors(self, program, cases):
        for arguments, part in cases:
            done = run(program, *arguments)
            self.assertEqual((done.returncode, done.stdout), (1, ""), (arguments, done.stderr))
            self.assertIn(part, done.stderr)

    def test_collectives_bench(self):
        self.assert_errors("collectives_bench", ((["--iterations", "0"], "--iterations is 0, but must be at least 1"),
                                                 (["--iterations", "abc"], "Illegal value 'abc' specified for flag 'iterations'"),
                                                 (["--bytes=-4"], "--bytes is -4, but must be at least 0"),
                                                 (["--ranks", "2", "--bytes", "4"], "--bytes is 4, but must be a multiple of 8: a float for each rank"),
                                                 (["--ranks", "2", "--bytes", "68"], "--bytes is 68, but must be a multiple of 8"),
                                                 (["--byte", "64"], "Unknown command line flag 'byte'"),
                                                 (["64"], "the argument '64' belongs to no flag")))
        done = run("collectives_bench", "--ranks", "2", "--iterations", "1", "--bytes", "64")
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        self.assertEqual([(line["collective"], line["bytes"], line["ranks"]) for line in lines],
                         [(name, 64, 2) for name in ("all_gather", "reduce_scatter", "all_reduce")])

    def test_simulated_cluster(self):
        self.assert_errors("simulated_cluster", ((["--layers", "abc"], "--layers is 'abc', but must be a positive number"),
                                                 (["--length", "8x"], "--length is '8x', but must be a positive number"),
                                                 (["--flops", "-1"], "--flops is '-1', but must be a positive number"),
                                                 (["0"], "RANKS is '0', but must be a positive number"),
                                                 (["99999999999999999999"], "RANKS is '99999999999999999999', but must be"),
                                                 (["--layers"], "--layers needs a value"),
                                                 (["--layer", "1"], "unknown argument --layer. Usage: simulated_cluster")))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[2:])
