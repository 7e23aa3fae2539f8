// Damaged and hostile headers and indexes: each is read or refused with a c10::Error, and never anything else.
#include <tessera/checkpoint/checksum.h>
#include <tessera/checkpoint/distcp.h>
#include <tessera/checkpoint/index.h>
#include <tessera/checkpoint/pickle.h>
#include <tessera/checkpoint/reader.h>
#include <tessera/checkpoint/safetensors.h>

#include <random>

#include "temporary_folder.h"

namespace tessera::checkpoint {
namespace {

// Seconds a reader; scripts/test-full sets more.
std::chrono::duration<double> budget() {
  const char* seconds = std::getenv("TESSERA_FUZZ_SECONDS");
  return std::chrono::duration<double>(seconds != nullptr ? std::atof(seconds) : 1.0);
}

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
std::optional<Index> error_free_index(const std::filesystem::path& path) {
  try {
    return index_of_distcp(path);
  } catch (const c10::Error&) {
    return std::nullopt;
  }
}

template <typename Work>
void fuzz(const std::vector<std::string>& seeds, const Work& work) {
  std::mt19937 generator(1);
  const auto end = std::chrono::steady_clock::now() + budget();
  int64_t read = 0, refused = 0;
  while (std::chrono::steady_clock::now() < end) {
    const auto text = mutate(seeds[generator() % seeds.size()], generator);
    try {
      work(text);
      ++read;
    } catch (const c10::Error&) {
      ++refused;
    }
  }
  EXPECT_GT(read, 0);
  EXPECT_GT(refused, read);
  ::testing::Test::RecordProperty("tries", static_cast<int>(read + refused));
}

TEST(Fuzz, SafetensorsHeaders) {
  SafetensorsHeader header;
  header.tensors = {
      {"weight", at::kFloat, {2, 3}}, {"bias", at::kBFloat16, {4}}, {"empty", at::kLong, {0, 7}}, {"scalar", at::kDouble, {}}};
  header.metadata = {{"format", "pt"}, {"DCP_SHARDING_INFO", R"({"weight":{"saved_offsets":[0,0]}})"}};
  const auto text = encode_safetensors(header, "seed").substr(8);
  fuzz({text}, [&](const std::string& mutated) {
    const auto length = static_cast<uint64_t>(mutated.size());
    const auto prefix = std::string(reinterpret_cast<const char*>(&length), 8) + mutated;
    const auto bytes = static_cast<int64_t>(prefix.size()) + 24 + 8 + 8;
    const auto parsed = parse_safetensors(prefix, bytes, "fuzz");
    for (const auto& tensor : parsed.tensors) TORCH_INTERNAL_ASSERT(tensor.begin >= 0 && tensor.end <= bytes);
  });
}

TEST(Fuzz, SafetensorsFiles) {
  const testing::TemporaryFolder folder;
  SafetensorsHeader header;
  header.tensors = {{"weight", at::kFloat, {2, 3}}};
  const auto file = encode_safetensors(header, "seed") + std::string(24, 'x');
  fuzz({file}, [&](const std::string& mutated) {
    testing::write_text(folder.path() / "f", mutated);
    const auto opened = File::open(folder.path() / "f");
    parse_safetensors(read_safetensors_prefix(opened), opened.size(), "fuzz");
  });
}

TEST(Fuzz, Indexes) {
  const testing::TemporaryFolder folder;
  testing::write_text(folder.path() / "a.safetensors", std::string(300, 'x'));
  Index index;
  index.saved_at = 1;
  index.world_size = 2;
  index.files = {{"a.safetensors", 300, 100, checksum(std::string(100, 'x'))}};
  const auto sum = [](size_t bytes) { return std::vector<uint64_t>{checksum(std::string(bytes, 'x'))}; };
  index.tensors = {
      {"w", {"tied"}, at::kFloat, {4, 4}, "plain", {{{{0, 0}, {3, 4}}, 0, 100, sum(48)}, {{{3, 0}, {1, 4}}, 0, 148, sum(16)}}},
      {"b", {}, at::kByte, {5}, "plain", {{{{0}, {5}}, 0, 164, sum(5)}}}};
  index.values = {{"step", int64_t{5}},
                  {"lr", 0.1},
                  {"inf", std::numeric_limits<double>::infinity()},
                  {"list", std::vector<std::string>{"x"}}};
  const auto text = encode_index(index);
  const auto body = text.substr(text.find('\n') + 1);
  fuzz({body}, [&](const std::string& mutated) {
    // With the right checksum, as a hostile writer would make it.
    const auto parsed =
        parse_index("{\"tessera_checkpoint\": 1, \"xxh3\": \"" + to_hex(checksum(mutated)) + "\",\n" + mutated, "fuzz");
    Reader(folder.path(), parsed, true).verify_all();
    EXPECT_EQ(encode_index(parse_index(encode_index(parsed), "fuzz")), encode_index(parsed));
  });
}

TEST(Fuzz, Pickles) {
  const auto metadata = testing::read_text(std::filesystem::path(TESSERA_FIXTURES) / "distcp" / ".metadata");
  fuzz({metadata}, [&](const std::string& mutated) {
    const Pickle pickle(mutated, "fuzz");
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
  for (size_t i = 0; i < files.size(); ++i) seeds.push_back(static_cast<char>(i) + files[i].second);
  fuzz(seeds, [&](const std::string& mutated) {
    if (mutated.empty()) TORCH_CHECK(false, "nothing left");
    const auto& [name, text] = files[static_cast<unsigned char>(mutated[0]) % files.size()];
    testing::write_text(name, mutated.substr(1));
    const auto index = error_free_index(path);
    testing::write_text(name, text);
    TORCH_CHECK(index, "refused");
  });
}

} // namespace
} // namespace tessera::checkpoint
