#include <gmock/gmock.h>
#include <tessera/checkpoint/bytes/checksum.h>
#include <tessera/checkpoint/formats/index.h>
#include <torch/torch.h>

#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/temporary_folder.h>

namespace tessera::checkpoint::index_test {
namespace {

using testing::error_of;
using ::testing::HasSubstr;

internal::Index example() {
  internal::Index index;
  index.saved_at = 1700000000000000;
  index.world_size = 2;
  index.files = {{"a.safetensors", 8 + 100 + 48, 108, 7}, {"b.safetensors", 8 + 100 + 16, 108, 8}};
  index.tensors = {{"w",
                    {"tied"},
                    at::kFloat,
                    {4, 4},
                    "(Shard(0)) on [2]",
                    {{{{0, 0}, {3, 4}}, 0, 108, {1}}, {{{3, 0}, {1, 4}}, 1, 108, {2}}}},
                   {"empty", {}, at::kLong, {0, 3}, "plain", {{{{0, 0}, {0, 3}}, 0, 108, {}}}}};
  index.values = {
      {"step", int64_t{5}}, {"lr", 0.1}, {"name", std::string("x\ny")}, {"list", std::vector<int64_t>{1, -2}}, {"flag", true}};
  return index;
}

// The index's text after a change to its JSON, with a correct checksum again.
std::string with_change(const std::string& from, const std::string& to) {
  auto text = internal::encode_index(example());
  auto body = text.substr(text.find('\n') + 1);
  const auto at = body.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  body.replace(at, from.size(), to);
  return "{\"tessera_checkpoint\": 1, \"xxh3\": \"" + internal::to_hex(internal::checksum(body)) + "\",\n" + body;
}

TEST(Index, ComesBack) {
  const auto index = example();
  const auto text = internal::encode_index(index);
  const auto back = internal::parse_index(text, "index.json");
  EXPECT_EQ(internal::encode_index(back), text);
  EXPECT_EQ(back.values, index.values);
  EXPECT_EQ(back.tensors[0].chunks[1].box, index.tensors[0].chunks[1].box);
  EXPECT_EQ(back.contents().tensors.at("w").sizes, (std::vector<int64_t>{4, 4}));
}

TEST(Index, EveryFlippedByteIsFound) {
  const auto text = internal::encode_index(example());
  for (size_t i = 0; i < text.size(); ++i) {
    for (const int bit : {0, 3, 7}) {
      auto damaged = text;
      damaged[i] = static_cast<char>(damaged[i] ^ (1 << bit));
      ASSERT_THAT(error_of([&] { internal::parse_index(damaged, "index.json"); }), HasSubstr("index.json"))
          << "byte " << i << " bit " << bit;
    }
  }
}

TEST(Index, EveryTruncationIsFound) {
  const auto text = internal::encode_index(example());
  for (size_t size = 0; size < text.size(); ++size) {
    ASSERT_THAT(error_of([&] { internal::parse_index(text.substr(0, size), "index.json"); }), HasSubstr("index.json")) << size;
  }
}

TEST(Index, WhatDoesNotFitTogetherIsAnError) {
  const std::vector<std::tuple<std::string, std::string, std::string>> cases{
      {"\"shape\":[4,4]", "\"shape\":[5,4]", "tensor \"w\": its chunks hold 16 of 20 elements"},
      {"\"offsets\":[3,0]", "\"offsets\":[2,0]", "tensor \"w\": its chunks overlap"},
      {"\"offsets\":[3,0]", "\"offsets\":[4,0]", "tensor \"w\": a chunk lies outside the shape [4, 4]"},
      {"\"begin\":108", "\"begin\":112", "tensor \"w\": chunk [0:3, 0:4] lies outside the data of a.safetensors"},
      {"\"begin\":108", "\"begin\":9223372036854775807", "lies outside the data of a.safetensors"},
      {"\"begin\":108", "\"begin\":0", "lies outside the data of a.safetensors"},
      {"\"file\":1", "\"file\":2", "tensor \"w\": a chunk lies in file 2 of 2"},
      {"0000000000000002", "", "tensor \"w\": chunk [3:4, 0:4] has 0 checksums for 1 blocks"},
      {"\"a.safetensors\"", "\"../a.safetensors\"", "files[0].name is not a file name"},
      {"\"shape\":[0,3]", "\"shape\":[1,3]", "tensor \"empty\": its chunks hold 0 of 3 elements"},
      {"\"shape\":[0,3]", "\"shape\":[4611686018427387904,3]", "is too large"},
      {"\"name\":\"empty\"", "\"name\":\"tied\"", "the name \"tied\" appears twice"},
      {"\"name\":\"step\"", "\"name\":\"w\"", "the name \"w\" appears twice"},
      {"\"dtype\":\"F32\"", "\"dtype\":\"F31\"", "tensors[0] \"w\" has the unknown dtype \"F31\""},
      {"{\"i64\":5}", "{\"i65\":5}", "values[0].value has the unknown type \"i65\""},
      {"{\"i64\":5}", "{\"i64\":5.5}", "values[0].value.i64 is not a 64-bit integer"},
      {"\"block_bytes\":1048576", "\"block_bytes\":0", "block_bytes is not between"},
  };
  for (const auto& [from, to, expected] : cases) {
    const auto text = with_change(from, to);
    EXPECT_THAT(error_of([&] { internal::parse_index(text, "index.json"); }), HasSubstr(expected)) << from << " -> " << to;
  }
}

// The time grows with their number, not with its square.
TEST(Index, ManyItemsTakeLittleTime) {
  constexpr int64_t kMany = 100'000;
  auto tensors = example(), empty = example(), grid = example();
  for (int64_t i = 0; i < kMany; ++i) {
    tensors.tensors.push_back({c10::str("t", i), {}, at::kFloat, {0}, "", {}});
    empty.tensors[1].chunks.push_back({{{0, 0}, {0, 3}}, 0, 108, {}});
  }
  grid.tensors[0].chunks.clear();
  grid.files[0].bytes = 108 + 4 * kMany;
  grid.tensors[0].sizes = {1, kMany};
  for (int64_t i = 0; i < kMany; ++i) grid.tensors[0].chunks.push_back({{{0, i}, {1, 1}}, 0, 108 + 4 * i, {1}});
  EXPECT_EQ(internal::parse_index(internal::encode_index(tensors), "index.json").tensors.size(), kMany + 2);
  EXPECT_EQ(internal::parse_index(internal::encode_index(empty), "index.json").tensors[1].chunks.size(), kMany + 1);
  EXPECT_EQ(internal::parse_index(internal::encode_index(grid), "index.json").tensors[0].chunks.size(), kMany);
  grid.tensors[0].chunks[7].box.offsets[1] = 5;
  EXPECT_THAT(error_of([&] { internal::parse_index(internal::encode_index(grid), "index.json"); }),
              HasSubstr("tensor \"w\": its chunks overlap"));
}

TEST(Index, AFolderWithoutOneIsNotComplete) {
  const testing::TemporaryFolder folder;
  EXPECT_THAT(error_of([&] { internal::read_index(folder.path()); }),
              HasSubstr("is not a complete checkpoint: it has no index.json"));
  EXPECT_THAT(error_of([&] { internal::read_index(folder.path() / "none"); }), HasSubstr("no such folder"));
}

} // namespace
} // namespace tessera::checkpoint::index_test
