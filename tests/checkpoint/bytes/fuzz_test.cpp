// Damaged and hostile files: each is read or refused with a c10::Error, never anything else, and with memory in proportion to its
// size.
#include <gtest/gtest.h>
#include <tessera/checkpoint/bytes/checksum.h>
#include <tessera/checkpoint/bytes/file.h>
#include <tessera/checkpoint/bytes/pickle.h>
#include <tessera/checkpoint/formats/distcp.h>
#include <tessera/checkpoint/formats/index.h>
#include <tessera/checkpoint/formats/open.h>
#include <tessera/checkpoint/formats/reader.h>
#include <tessera/checkpoint/formats/safetensors.h>
#include <tessera/checkpoint/formats/torch_archive.h>
#include <tessera/checkpoint/hugging_face.h>
#include <tessera/checkpoint/torch_file.h>
#include <torch/torch.h>

#include <ctime>
#include <random>

#include <tessera/tests/checkpoint/torch_archives.h>
#include <tessera/tests/support/allocations.h>
#include <tessera/tests/support/temporary_folder.h>

namespace tessera::checkpoint::fuzz_test {
namespace {

// Seconds of CPU time a reader; scripts/test-full sets more.
double budget() {
  const char* seconds = std::getenv("TESSERA_FUZZ_SECONDS");
  return seconds != nullptr ? std::atof(seconds) : 1.0;
}

double cpu_seconds() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

// Parsed text takes more room than its bytes, but no number in it decides how much.
constexpr size_t kLargestPerByte = 64, kPeakPerByte = 256, kSlack = 256 << 10;

const std::vector<std::string> kTokens{"0",
                                       "-1",
                                       "1",
                                       "9223372036854775807",
                                       "9223372036854775808",
                                       "18446744073709551616",
                                       "1e999",
                                       "0.5",
                                       "null",
                                       "true",
                                       "[]",
                                       "{}",
                                       "[[[[",
                                       "\"\"",
                                       "\"F32\"",
                                       "\"BF16\"",
                                       "\"U8\"",
                                       "\"I64\"",
                                       ",",
                                       ":",
                                       "}",
                                       "]",
                                       "{\"a",
                                       "\xff",
                                       "\\u00",
                                       "\"__metadata__\":{}",
                                       "\n",
                                       "4611686018427387904",
                                       " "};

// A few random edits: a bit, a run of bytes, a token in the place of a number, a truncation.
std::string mutate(std::string text, std::mt19937& generator) {
  const auto below = [&](size_t n) { return n == 0 ? 0 : generator() % n; };
  for (size_t edits = 1 + below(4); edits > 0 && !text.empty(); --edits) {
    const auto at = below(text.size());
    switch (below(6)) {
      case 0: text[at] = static_cast<char>(text[at] ^ (1 << below(8))); break;
      case 1: text.erase(at, 1 + below(20)); break;
      case 2: text.insert(at, text.substr(below(text.size()), below(60))); break;
      case 3: text.insert(at, kTokens[below(kTokens.size())]); break;
      case 4: {
        const auto begin = text.find_first_of("0123456789", at);
        if (begin == std::string::npos) break;
        const auto end = std::min(text.find_first_not_of("0123456789", begin), text.size());
        text.replace(begin, end - begin, kTokens[below(kTokens.size())]);
        break;
      }
      default:
        if (below(10) == 0) text.resize(at);
    }
  }
  return text;
}

// The index of a distributed checkpoint, nothing when it is refused.
std::optional<internal::Index> error_free_index(const std::filesystem::path& path) {
  try {
    return internal::index_of_distcp(path);
  } catch (const c10::Error&) {
    return std::nullopt;
  }
}

// `read` gets damaged copies of the seeds. `other_bytes`: of further files that it reads whole.
template <typename Read>
void fuzz(const std::vector<std::string>& seeds, const Read& read, size_t other_bytes = 0) {
  std::mt19937 generator(1);
  const auto end = cpu_seconds() + budget();
  int64_t accepted = 0, refused = 0;
  while (cpu_seconds() < end) {
    const auto text = mutate(seeds[generator() % seeds.size()], generator);
    const testing::AllocationMeter meter;
    try {
      read(text);
      ++accepted;
    } catch (const c10::Error&) {
      ++refused;
    }
    const auto bytes = text.size() + other_bytes;
    ASSERT_LE(meter.largest(), kLargestPerByte * bytes + kSlack) << ::testing::PrintToString(text);
    ASSERT_LE(meter.peak(), kPeakPerByte * bytes + kSlack) << ::testing::PrintToString(text);
  }
  EXPECT_GT(accepted, 0);
  EXPECT_GT(refused, accepted);
  std::printf("%ld damaged inputs: %ld refused, %ld read\n", static_cast<long>(accepted + refused), static_cast<long>(refused),
              static_cast<long>(accepted));
}

TEST(AllocationMeter, SeesWhatTheLibraryAllocates) {
  const testing::TemporaryFolder folder;
  testing::write_text(folder.path() / "f", std::string(3 << 20, 'x'));
  const testing::AllocationMeter meter;
  EXPECT_EQ(internal::read_file(folder.path() / "f", 4 << 20).size(), 3 << 20);
  EXPECT_GE(meter.largest(), 3 << 20);
  EXPECT_LT(meter.largest(), 4 << 20);
  EXPECT_GE(meter.peak(), 3 << 20);
}

// A pickle may name one list again and again, of numbers, or of what no value holds.
TEST(TorchFile, AListThatManyHoldIsNotReadForEach) {
  const testing::TemporaryFolder folder;
  const auto file = folder.path() / "model.pt";
  for (const std::string last : {"K\x01", "N"}) {
    std::string pickle = "\x80\x02}(", list = "](";
    for (int i = 0; i < 2000; ++i) list += "K\x01";
    for (int i = 0; i < 4000; ++i) {
      const auto name = std::to_string(i);
      pickle += "X" + std::string{static_cast<char>(name.size()), 0, 0, 0} + name + (i == 0 ? list + last + "eq\x01" : "h\x01");
    }
    testing::write_archive(file, pickle + "u.", "");
    const testing::AllocationMeter meter;
    internal::index_of_torch_file(file);
    EXPECT_LT(meter.total(), 10 * 64 * std::filesystem::file_size(file));
  }
}

// Reads all that the JSON holds, as whatever it looks like.
void walk(const internal::JsonView& json) {
  const auto attempt = [](const auto& read) {
    try {
      read();
    } catch (const c10::Error&) { // another type
    }
  };
  attempt([&] { json.string(); });
  attempt([&] { json.number(); });
  attempt([&] { json.integer(); });
  attempt([&] { json.non_negatives(); });
  attempt([&] { EXPECT_EQ(internal::to_json(internal::state_value_from_json(json)), json.json()); });
  if (json.json().is_object()) {
    for (const auto& [key, value] : json.fields()) walk(value);
  } else if (json.json().is_array()) {
    for (const auto& value : json.elements()) walk(value);
  }
}

TEST(Fuzz, Json) {
  const std::string text =
      R"({"a": [1, -2, 3.5, 1e300], "b": {"f64": "inf"}, "c": {"i64[]": [1, 9223372036854775807]}, "d": {"string": "x\u00e9\n"},)"
      R"( "e": {"f64[]": [0.1, "nan"]}, "f": {"bool": true}, "g": [[[[null]]]], "h": {"string[]": ["", "y"]}})";
  fuzz({text}, [&](const std::string& mutated) {
    const auto json = internal::parse_json(mutated, "fuzz");
    walk(internal::JsonView(json, "fuzz"));
    EXPECT_EQ(internal::parse_json(internal::dump_json(json, "fuzz"), "fuzz"), json);
  });
}

TEST(Fuzz, SafetensorsHeaders) {
  internal::SafetensorsHeader header;
  header.tensors = {
      {"weight", at::kFloat, {2, 3}}, {"bias", at::kBFloat16, {4}}, {"empty", at::kLong, {0, 7}}, {"scalar", at::kDouble, {}}};
  header.metadata = {{"format", "pt"}, {"DCP_SHARDING_INFO", R"({"weight":{"saved_offsets":[0,0]}})"}};
  const auto text = internal::encode_safetensors(header, "seed").substr(8);
  fuzz({text}, [&](const std::string& mutated) {
    const auto length = static_cast<uint64_t>(mutated.size());
    const auto prefix = std::string(reinterpret_cast<const char*>(&length), 8) + mutated;
    const auto bytes = static_cast<int64_t>(prefix.size()) + 24 + 8 + 8;
    const auto parsed = internal::parse_safetensors(prefix, bytes, "fuzz");
    for (const auto& tensor : parsed.tensors) TORCH_INTERNAL_ASSERT(tensor.begin >= 0 && tensor.end <= bytes);
  });
}

TEST(Fuzz, SafetensorsFiles) {
  const testing::TemporaryFolder folder;
  internal::SafetensorsHeader header;
  header.tensors = {{"weight", at::kFloat, {2, 3}}};
  const auto file = internal::encode_safetensors(header, "seed") + std::string(24, 'x');
  fuzz({file}, [&](const std::string& mutated) {
    testing::write_text(folder.path() / "f", mutated);
    const auto opened = internal::File::open(folder.path() / "f");
    internal::parse_safetensors(internal::read_safetensors_prefix(opened), opened.size(), "fuzz");
  });
}

TEST(Fuzz, Indexes) {
  const testing::TemporaryFolder folder;
  testing::write_text(folder.path() / "a.safetensors", std::string(300, 'x'));
  internal::Index index;
  index.saved_at = 1;
  index.world_size = 2;
  index.files = {{"a.safetensors", 300, 100, internal::checksum(std::string(100, 'x'))}};
  const auto sum = [](size_t bytes) { return std::vector<uint64_t>{internal::checksum(std::string(bytes, 'x'))}; };
  index.tensors = {
      {"w", {"tied"}, at::kFloat, {4, 4}, "plain", {{{{0, 0}, {3, 4}}, 0, 100, sum(48)}, {{{3, 0}, {1, 4}}, 0, 148, sum(16)}}},
      {"b", {}, at::kByte, {5}, "plain", {{{{0}, {5}}, 0, 164, sum(5)}}}};
  index.values = {{"step", int64_t{5}},
                  {"lr", 0.1},
                  {"inf", std::numeric_limits<double>::infinity()},
                  {"list", std::vector<std::string>{"x"}}};
  const auto text = internal::encode_index(index);
  const auto body = text.substr(text.find('\n') + 1);
  fuzz({body}, [&](const std::string& mutated) {
    // With the right checksum, as a hostile writer would make it.
    const auto parsed = internal::parse_index(
        "{\"tessera_checkpoint\": 1, \"xxh3\": \"" + internal::to_hex(internal::checksum(mutated)) + "\",\n" + mutated, "fuzz");
    internal::Reader(folder.path(), parsed, true).verify_all();
    EXPECT_EQ(internal::encode_index(internal::parse_index(internal::encode_index(parsed), "fuzz")),
              internal::encode_index(parsed));
  });
}

TEST(Fuzz, HuggingFaceIndexes) {
  const testing::TemporaryFolder folder;
  StateDict state;
  for (const auto* name : {"a", "b", "c"}) state.add(name, torch::ones({2, 3}));
  save_hugging_face(state, folder.path() / "c", {.max_file_bytes = 30});
  const auto path = folder.path() / "c" / "model.safetensors.index.json";
  const auto index = testing::read_text(path);
  fuzz({index}, [&](const std::string& mutated) {
    testing::write_text(path, mutated);
    internal::open_checkpoint(folder.path() / "c");
  });
}

TEST(Fuzz, Pickles) {
  const auto metadata = testing::read_text(std::filesystem::path(TESSERA_FIXTURES) / "distcp" / ".metadata");
  fuzz({metadata}, [&](const std::string& mutated) {
    const internal::Pickle pickle(mutated, "fuzz");
    EXPECT_NE(pickle.root(), nullptr);
  });
}

TEST(Fuzz, DistributedCheckpoints) {
  const testing::TemporaryFolder folder;
  const auto path = folder.path() / "c";
  std::filesystem::copy(std::filesystem::path(TESSERA_FIXTURES) / "distcp", path);
  std::vector<std::pair<std::filesystem::path, std::string>> files;
  for (const auto& entry : std::filesystem::directory_iterator(path))
    files.emplace_back(entry.path(), testing::read_text(entry.path()));
  // The first character says which of the files is damaged; the others are whole.
  std::vector<std::string> seeds;
  size_t all_bytes = 0;
  for (const auto& [name, text] : files) all_bytes += text.size();
  for (size_t i = 0; i < files.size(); ++i) seeds.push_back(static_cast<char>(i) + files[i].second);
  fuzz(
      seeds,
      [&](const std::string& mutated) {
        if (mutated.empty()) TORCH_CHECK(false, "nothing left");
        const auto& [name, text] = files[static_cast<unsigned char>(mutated[0]) % files.size()];
        testing::write_text(name, mutated.substr(1));
        const auto index = error_free_index(path);
        testing::write_text(name, text);
        TORCH_CHECK(index, "refused");
      },
      all_bytes);
}

TEST(Fuzz, TorchFiles) {
  const testing::TemporaryFolder folder;
  const auto path = folder.path() / "model.pt";
  StateDict state;
  for (int i = 0; i < 20; ++i) state.add("layers." + std::to_string(i) + ".weight", torch::ones({3, 2}));
  state.set("step", 7);
  state.set("names", StateValue(std::vector<std::string>{"a", "b"}));
  save_torch(state, path);
  fuzz({testing::read_text(path)}, [&](const std::string& mutated) {
    testing::write_text(path, mutated);
    internal::open_checkpoint(path);
  });
}

} // namespace
} // namespace tessera::checkpoint::fuzz_test
