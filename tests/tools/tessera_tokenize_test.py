"""tessera-tokenize gives the ids of Hugging Face's `tokenizers`, for tokenizers that are trained here, on random Unicode text.

Usage: tessera_tokenize_test.py TESSERA_TOKENIZE [unittest's arguments]; skipped where `tokenizers` is not installed (scripts/setup
--references).
"""
import json
import os
import pathlib
import random
import struct
import subprocess
import sys
import tempfile
import unicodedata
import unittest

try:
    from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
except ImportError:
    print("skipped: tokenizers is not installed (scripts/setup --references)")
    sys.exit(77)

TOOL = sys.argv.pop(1)
ROOT = pathlib.Path(__file__).resolve().parents[2]
SEED = int(os.environ.get("TESSERA_TEST_SEED", "1"))

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
GPT4O = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
         r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
         r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")

# Texts in which what the patterns look for is frequent.
FRAGMENTS = ["don't", "I'LL", "WE'VE", "it\u017f", "'\u017f", " 's", "2024", "12345678", "\u0662\u0663", "\u2167", "x\u00b2", "\r\n", "\n\n", "\n", "\t",
             "   ", " \u00a0", "\u3000", "\u2028", "\x0b", "\x85", "\u200b", "\u00e9", "e\u0301", "\u0130", "\u03a3\u03b1\u03a3", "\u00df",
             "\ufb01", "\u00c5ngstr\u00f6m", "\u4e2d\u6587", "\ud55c\uad6d\uc5b4", "\u0939\u093f\u0928\u094d\u0926\u0940", "\u0627\u0644\u0639\u0631",
             "\U0001f600", "\U0001f468\u200d\U0001f469", "\U0002b820", "\U0002b920", "\x00", "\ufffd", "_", "foo_bar", "$5", "a/b", "...", "\u00ab",
             "<s>", "</s>", "<|endoftext|>", "[MASK]", "Word", "word", " word ", "NEWTOKEN", "new token"]


def alphabet():
    """Characters of Unicode 14 for which the tables of `tokenizers` are no older than that."""
    decompose = normalizers.NFKD()
    found = []
    for code in range(0x110000):
        character = chr(code)
        if unicodedata.category(character) in ("Cn", "Cs", "Co"):
            continue
        if decompose.normalize_str(character) == unicodedata.normalize("NFKD", character):
            found.append(character)
    return found


CHARACTERS = alphabet()
ENGLISH = [line for path in sorted((ROOT / "docs").glob("*.md")) for line in path.read_text().split("\n") if line][:4000]


def random_text(draw):
    parts = []
    for _ in range(draw.randrange(1, 30)):
        kind = draw.randrange(4)
        if kind == 0:
            parts.append(draw.choice(FRAGMENTS))
        elif kind == 1:
            parts.append("".join(draw.choice(CHARACTERS) for _ in range(draw.randrange(1, 6))))
        elif kind == 2:
            words = draw.choice(ENGLISH).split(" ")
            begin = draw.randrange(len(words))
            parts.append(" ".join(words[begin:begin + draw.randrange(1, 8)]))
        else:
            parts.append("".join(chr(draw.randrange(32, 0x250)) for _ in range(draw.randrange(1, 6))))
        if draw.random() < 0.5:
            parts.append(" ")
    return "".join(parts) or "nothing"


def read_tokens(path):
    """The documents of a file of tokens."""
    data = pathlib.Path(path).read_bytes()
    magic, version, token_bytes, tokens, documents, vocabulary = struct.unpack_from("<8sIIQQQ", data)
    assert magic == b"TSRTOKEN" and version == 1
    ids = struct.unpack_from(f"<{tokens}{'H' if token_bytes == 2 else 'I'}", data, 64)
    ends = struct.unpack_from(f"<{documents}q", data, 64 + (tokens * token_bytes + 7) // 8 * 8)
    assert all(each < vocabulary for each in ids)
    return [list(ids[begin:end]) for begin, end in zip((0, *ends), ends)]


def train(model, trainer, normalizer=None, pre_tokenizer=None, processor=None):
    tokenizer = Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.train_from_iterator(ENGLISH, trainer)
    if processor is not None:
        tokenizer.post_processor = processor(tokenizer)
    return tokenizer


def byte_level_bpe(pre_tokenizer, normalizer=None, processor=None, **model):
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=["<|endoftext|>", "<s>"], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    return train(models.BPE(**model), trainer, normalizer, pre_tokenizer, processor)


def word_piece(normalizer, pre_tokenizer=None):
    trainer = trainers.WordPieceTrainer(vocab_size=900, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], show_progress=False)
    frame = lambda tokenizer: processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")])
    return train(models.WordPiece(unk_token="[UNK]"), trainer, normalizer, pre_tokenizer or pre_tokenizers.BertPreTokenizer(), frame)


def split_bytes(pattern):
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"),
                                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def begin_of_text(tokenizer):
    template = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B",
                                             special_tokens=[("<s>", tokenizer.token_to_id("<s>"))])
    return processors.Sequence([processors.ByteLevel(trim_offsets=False), template])


class TokenizeTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.draw = random.Random(SEED)

    def tearDown(self):
        self.folder.cleanup()

    def path(self, name):
        return os.path.join(self.folder.name, name)

    def write(self, name, text):
        pathlib.Path(self.path(name)).write_text(text, encoding="utf-8", newline="")
        return self.path(name)

    def run_tool(self, *arguments):
        return subprocess.run([TOOL, *arguments, "-o", self.path("out.bin")], capture_output=True, text=True, timeout=300)

    def tokenize(self, *arguments):
        result = self.run_tool(*arguments)
        self.assertEqual(result.returncode, 0, result.stderr)
        return read_tokens(self.path("out.bin"))

    def compare(self, tokenizer, texts=None, *arguments):
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.save(self.path("tokenizer.json"))
        tokenizer = Tokenizer.from_file(self.path("tokenizer.json"))
        texts = texts or [random_text(self.draw) for _ in range(400)]
        lines = self.write("texts.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts))
        found = self.tokenize("--tokenizer", self.path("tokenizer.json"), "--documents", "jsonl", *arguments, lines)
        expected = [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens="--nospecial_tokens" not in arguments)]
        self.assertEqual(len(found), len(expected))
        for text, ours, theirs in zip(texts, found, expected):
            self.assertEqual(ours, theirs, f"of {text!r}: {[tokenizer.id_to_token(each) for each in theirs]}")

    def test_gpt2(self):
        for prefix_space in (False, True):
            self.compare(byte_level_bpe(pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)))

    def test_llama3(self):
        self.compare(byte_level_bpe(split_bytes(LLAMA3), processor=begin_of_text, ignore_merges=True))
        self.compare(byte_level_bpe(split_bytes(LLAMA3), processor=begin_of_text), None, "--nospecial_tokens")

    def test_frames_of_bert_and_roberta(self):
        tokenizer = byte_level_bpe(pre_tokenizers.ByteLevel())
        for frame in (processors.RobertaProcessing, processors.BertProcessing):
            tokenizer.post_processor = frame(("<|endoftext|>", 0), ("<s>", 1))
            self.compare(tokenizer, [random_text(self.draw) for _ in range(50)])

    def test_qwen_and_gpt4o(self):
        self.compare(byte_level_bpe(split_bytes(QWEN), normalizers.NFC()))
        self.compare(byte_level_bpe(split_bytes(GPT4O)))

    def test_bert(self):
        tokenizer = word_piece(normalizers.BertNormalizer())
        for lowercase in (True, False):
            for accents in (True, False, None):
                for clean in (True, False):
                    tokenizer.normalizer = normalizers.BertNormalizer(clean_text=clean, handle_chinese_chars=clean, strip_accents=accents,
                                                                      lowercase=lowercase)
                    self.compare(tokenizer)

    def test_every_character(self):
        """One by one, between letters, in the normalizers and patterns with tables of their own."""
        characters = CHARACTERS if os.environ.get("TESSERA_TEST_FULL") == "1" else self.draw.sample(CHARACTERS, 10000)
        texts = [f"a{character}b {character}" for character in characters]
        for normalizer in (normalizers.BertNormalizer(), normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]),
                           normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])):
            tokenizer = Tokenizer(models.BPE({chr(0x21 + i): i for i in range(94)} | {"?unk?": 94}, [], unk_token="?unk?"))
            tokenizer.normalizer = normalizer
            tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
            self.compare(tokenizer, texts)
        self.compare(byte_level_bpe(split_bytes(LLAMA3)), texts)
        self.compare(byte_level_bpe(split_bytes(r"\w+|\W|\S")), texts)

    def test_other_parts(self):
        trainer = lambda **more: trainers.BpeTrainer(vocab_size=700, special_tokens=["<unk>"], show_progress=False, **more)
        normalizer = normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()])
        self.compare(train(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"), trainer(end_of_word_suffix="</w>"), normalizer,
                           pre_tokenizers.BertPreTokenizer()))
        for fuse in (False, True):
            self.compare(train(models.BPE(unk_token="<unk>", fuse_unk=fuse), trainer(), None, pre_tokenizers.WhitespaceSplit()))
        for digits in (False, True):
            chain = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Digits(individual_digits=digits),
                                             pre_tokenizers.Punctuation("contiguous")])
            self.compare(train(models.BPE(unk_token="<unk>"), trainer(), None, chain))
        self.compare(train(models.BPE(unk_token="<unk>", continuing_subword_prefix="##"), trainer(continuing_subword_prefix="##"), None,
                           pre_tokenizers.BertPreTokenizer()))
        bytes_of_text = {f"<0x{byte:02X}>": byte for byte in range(200)} | {"a": 300, "b": 301, "ab": 302, "<unk>": 303}
        for fuse in (False, True):
            self.compare(Tokenizer(models.BPE(bytes_of_text, [("a", "b")], unk_token="<unk>", byte_fallback=True, fuse_unk=fuse)))

    def test_split_behaviors(self):
        tokenizer = byte_level_bpe(pre_tokenizers.ByteLevel(add_prefix_space=False))
        for behavior in ("removed", "isolated", "merged_with_previous", "merged_with_next", "contiguous"):
            for invert in (False, True):
                for pattern in (Regex(r"\s|\d"), Regex(r"\p{L}+"), "a", "  "):
                    split = pre_tokenizers.Split(pattern, behavior, invert)
                    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
                    self.compare(tokenizer, [random_text(self.draw) for _ in range(40)])

    def test_added_tokens(self):
        for normalizer in (None, normalizers.Lowercase(), normalizers.NFKC()):
            tokenizer = byte_level_bpe(pre_tokenizers.ByteLevel(add_prefix_space=False), normalizer)
            tokenizer.add_special_tokens([AddedToken("[MASK]", lstrip=True, rstrip=self.draw.random() < 0.5)])
            tokenizer.add_tokens([AddedToken("NEWTOKEN"), AddedToken("NEW", single_word=True), AddedToken("Word", normalized=False),
                                  AddedToken("word", single_word=True, lstrip=True), AddedToken(" w", rstrip=True),
                                  AddedToken("\u00e9", normalized=True), AddedToken("new token", rstrip=True), AddedToken("...")])
            texts = ["".join(self.draw.choice(["[MASK]", " ", "  ", "NEW", "NEWTOKEN", "newtoken", "Word", "word", "words", "\u00e9", "e\u0301",
                                               "new token", ".", "....", "\u3000", "x", "_", "\n"]) for _ in range(12)) for _ in range(500)]
            self.compare(tokenizer, texts)

    @unittest.skipUnless((ROOT / ".data/minilm/tokenizer.json").exists(), "the model is not there (scripts/setup --minilm)")
    def test_a_published_tokenizer(self):
        self.compare(Tokenizer.from_file(str(ROOT / ".data/minilm/tokenizer.json")), [random_text(self.draw) for _ in range(2000)])

    def test_documents(self):
        byte_level_bpe(pre_tokenizers.ByteLevel(add_prefix_space=False)).save(self.path("tokenizer.json"))
        tokenizer = Tokenizer.from_file(self.path("tokenizer.json"))
        encode = lambda text: tokenizer.encode(text).ids
        options = ("--tokenizer", self.path("tokenizer.json"))
        first, second = self.write("a.txt", "One line.\r\n\n  \nAnother, \u00e9.\n"), self.write("b.txt", "The last\nhas no end")
        empty = self.write("empty.txt", "")
        self.assertEqual(self.tokenize(*options, first, empty, second), [encode("One line.\r\n\n  \nAnother, \u00e9.\n"), encode("The last\nhas no end")])
        lines = ["One line.", "Another, \u00e9.", "The last", "has no end"]
        self.assertEqual(self.tokenize(*options, "--documents", "lines", first, empty, second), [encode(line) for line in lines])
        end, begin = tokenizer.token_to_id("<|endoftext|>"), tokenizer.token_to_id("<s>")
        framed = self.tokenize(*options, "--documents", "lines", "--begin", "<s>", "--end", "<|endoftext|>", first)
        self.assertEqual(framed, [[begin, *encode(line), end] for line in lines[:2]])
        body = self.write("c.jsonl", '{"id": 1, "body": "x y"}\n\n{"body": ""}\n{"body": "\\u00e9"}\n')
        self.assertEqual(self.tokenize(*options, "--documents", "jsonl", "--field", "body", body), [encode("x y"), encode("\u00e9")])

    def test_threads_keep_the_order(self):
        tokenizer = byte_level_bpe(pre_tokenizers.ByteLevel(add_prefix_space=False))
        tokenizer.save(self.path("tokenizer.json"))
        texts = [line for line in ENGLISH for _ in range(20)]
        path = self.write("texts.txt", "\n".join(texts))
        alone = self.tokenize("--tokenizer", self.path("tokenizer.json"), "--documents", "lines", "--threads", "1", path)
        self.assertEqual(alone, self.tokenize("--tokenizer", self.path("tokenizer.json"), "--documents", "lines", "--threads", "4", path))
        self.assertEqual(alone[::20], [encoding.ids for encoding in tokenizer.encode_batch([line for line in ENGLISH if line.strip()])])

    def refused(self, change, *words):
        """The tool refuses a tokenizer.json with this change, and names the file and what it does not support."""
        saved = json.loads(self.whole)
        change(saved)
        path = self.write("changed.json", json.dumps(saved))
        result = self.run_tool("--tokenizer", path, self.write("a.txt", "text"))
        self.assertEqual(result.returncode, 1, result.stdout)
        for word in (path, *words):
            self.assertIn(word, result.stderr)
        self.assertFalse(os.path.exists(self.path("out.bin")))

    def test_what_is_not_supported(self):
        byte_level_bpe(split_bytes(QWEN), normalizers.NFC()).save(self.path("tokenizer.json"))
        self.whole = pathlib.Path(self.path("tokenizer.json")).read_text()
        metaspace = {"type": "Metaspace", "replacement": "\u2581"}
        self.refused(lambda it: it.update(pre_tokenizer=metaspace), "does not support the pre-tokenizer Metaspace")
        self.refused(lambda it: it["pre_tokenizer"]["pretokenizers"].append(metaspace), ".pre_tokenizer.pretokenizers[2]", "Metaspace")
        self.refused(lambda it: it.update(normalizer={"type": "Nmt"}), "does not support the normalizer Nmt")
        self.refused(lambda it: it["normalizer"].update(fold=True), 'does not support the key "fold" of NFC')
        self.refused(lambda it: it["model"].update(type="Unigram"), "does not support the model Unigram")
        self.refused(lambda it: it["model"].update(dropout=0.1), "does not support dropout")
        self.refused(lambda it: it["model"]["merges"].append(["\u0120", "zzz"]), "the vocabulary lacks the token")
        self.refused(lambda it: it.update(post_processor={"type": "Other"}), "does not support the post-processor Other")
        for expression, word in ((r"\p{L}+\b", r"\b"), (r"\h+", r"\h"), (r"(a)\1", r"\1"), (r"[[:alpha:]]", "POSIX class"), (r"a{1,2}+", "{n,m}+"),
                                 (r"(?m:.)", "the group (?m:"), (r"(a", "cannot compile"), (r"\p{Nonsense}", "cannot compile")):
            self.refused(lambda it: it["pre_tokenizer"]["pretokenizers"][0].update(pattern={"Regex": expression}), word, expression)

    def test_errors_name_the_place(self):
        byte_level_bpe(pre_tokenizers.ByteLevel()).save(self.path("tokenizer.json"))
        options = ("--tokenizer", self.path("tokenizer.json"))
        text = self.write("a.txt", "text")
        wrong = self.path("wrong.txt")
        pathlib.Path(wrong).write_bytes(b"fine\nab\xffcd\n")
        for arguments, words in (((*options,), "give --tokenizer, -o and files"),
                                 ((*options, self.path("none.txt")), self.path("none.txt") + ": No such file"),
                                 ((*options, "--documents", "lines", self.folder.name), "it is a folder"),
                                 ((*options, "--documents", "lines", text, wrong), wrong + ":2: not UTF-8 at byte 2"),
                                 ((*options, wrong), wrong + ": not UTF-8 at byte 7"),
                                 ((*options, "--documents", "words", text), "--documents is files, lines or jsonl, not words"),
                                 ((*options, "--documents", "jsonl", text), text + ":1: the line is no JSON object"),
                                 ((*options, "--documents", "jsonl", self.write("b.jsonl", '{"a": "b"}')), 'no text in the field "text"'),
                                 ((*options, "--end", "<|nothing|>", text), "has no token <|nothing|>"),
                                 ((*options, self.write("empty.txt", "")), "the files hold no text"),
                                 (("--tokenizer", text, text), text)):
            result = self.run_tool(*arguments)
            self.assertEqual(result.returncode, 1, arguments)
            self.assertIn(words, result.stderr)
        self.assertEqual([name for name in os.listdir(self.folder.name) if "out.bin" in name], [])


if __name__ == "__main__":
    unittest.main()
