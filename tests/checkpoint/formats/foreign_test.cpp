// Folders that other libraries write, sound and broken, made by hand.
#include <c10/util/ScopeExit.h>
#include <gmock/gmock.h>
#include <sys/resource.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/formats/open.h>
#include <tessera/checkpoint/formats/safetensors.h>
#include <tessera/checkpoint/hugging_face.h>
#include <torch/torch.h>

#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/temporary_folder.h>

namespace tessera::checkpoint::foreign_test {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using testing::TemporaryFolder;
using testing::write_text;

struct Part {
  std::string name;
  std::vector<int64_t> sizes;
  std::string offsets; // JSON
};

// A file of float parts, with sharding information when offsets are given.
void write_file(const std::filesystem::path& path, const std::vector<Part>& parts, at::ScalarType dtype = at::kFloat) {
  internal::SafetensorsHeader header;
  std::string info;
  for (const auto& part : parts) {
    header.tensors.push_back({part.name, dtype, part.sizes});
    if (!part.offsets.empty()) info += (info.empty() ? "{\"" : ",\"") + part.name + R"(":{"saved_offsets":)" + part.offsets + "}";
  }
  if (!info.empty()) header.metadata["DCP_SHARDING_INFO"] = info + "}";
  const auto prefix = internal::encode_safetensors(header, "test");
  const auto end = header.tensors.empty() ? header.data_begin : header.tensors.back().end;
  write_text(path, prefix + std::string(static_cast<size_t>(end - header.data_begin), '\0'));
}

std::string error_in(const std::filesystem::path& path) {
  return error_of([&] { internal::open_checkpoint(path); });
}

TEST(Foreign, PartsArePutTogether) {
  const TemporaryFolder folder;
  write_file(folder.path() / "a.safetensors", {{"w", {2, 3}, "[0,0]"}, {"b", {4}, "[0]"}});
  write_file(folder.path() / "b.safetensors", {{"w", {1, 3}, "[2,0]"}});
  const auto [path, index] = internal::open_checkpoint(folder.path());
  EXPECT_EQ(index.contents().tensors.at("w").sizes, (std::vector<int64_t>{3, 3}));
  EXPECT_FALSE(index.has_checksums);
  EXPECT_TRUE(verify(folder.path()).empty());
}

/// More than the soft limit of descriptors: a job of many ranks leaves as many.
TEST(Foreign, AFolderMayHaveManyFiles) {
  constexpr int kFiles = 100;
  const TemporaryFolder folder;
  StateDict state;
  for (int i = 0; i < kFiles; ++i) {
    const auto name = "w" + std::to_string(i);
    write_file(folder.path() / (name + ".safetensors"), {{name, {3}, ""}});
    state.add(name, torch::ones({3}));
  }
  rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const auto descriptors = std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
  const auto restore = c10::make_scope_exit([&] { setrlimit(RLIMIT_NOFILE, &before); });
  for (const bool verifies : {false, true}) {
    const rlimit low{static_cast<rlim_t>(descriptors + 20), before.rlim_max};
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
    if (verifies) {
      EXPECT_THAT(verify(folder.path()), ::testing::IsEmpty());
    } else {
      load(state, folder.path());
      for (const auto& entry : state.entries()) EXPECT_TENSORS_EQUAL(state.tensor(entry.name), torch::zeros({3}));
    }
  }
}

TEST(Foreign, BrokenPartsAreErrorsThatNameTheTensor) {
  const std::vector<std::pair<std::vector<Part>, std::string>> cases{
      {{{"w", {1, 3}, "[3,0]"}}, "tensor \"w\": its chunks hold 9 of 12 elements"},
      {{{"w", {1, 3}, "[1,0]"}}, "tensor \"w\": its chunks overlap"},
      {{{"w", {1, 3}, "[2]"}}, "tensor \"w\" has 2 dims and 1 saved_offsets"},
      {{{"w", {1, 3}, "[2,-1]"}}, "saved_offsets[1] is negative"},
      {{{"w", {1, 3}, "[9223372036854775807,0]"}}, "tensor \"w\" has saved_offsets that are too large"},
      {{{"w", {1, 3}, "[9223372036854775000,0]"}}, "tensor \"w\": the shape [9223372036854775001, 3] is too large"},
      {{{"w", {3}, "[0]"}}, "tensor \"w\" has another dtype or number of dims"},
  };
  for (const auto& [second, expected] : cases) {
    const TemporaryFolder folder;
    write_file(folder.path() / "a.safetensors", {{"w", {2, 3}, "[0,0]"}});
    write_file(folder.path() / "b.safetensors", second);
    EXPECT_THAT(error_in(folder.path()), HasSubstr(expected));
    EXPECT_THAT(verify(folder.path()), ::testing::ElementsAre(HasSubstr(expected)));
  }
}

TEST(Foreign, WholeTensorsInTwoFilesOverlap) {
  const TemporaryFolder folder;
  write_file(folder.path() / "a.safetensors", {{"w", {2}, ""}});
  write_file(folder.path() / "b.safetensors", {{"w", {2}, ""}});
  EXPECT_THAT(error_in(folder.path()), HasSubstr("tensor \"w\": its chunks overlap"));
}

TEST(Foreign, VariantsBesideAHuggingFaceFileAreNotRead) {
  const TemporaryFolder folder;
  write_file(folder.path() / "model.safetensors", {{"w", {2}, ""}});
  write_file(folder.path() / "model.fp16.safetensors", {{"w", {2}, ""}}, at::kHalf);
  const auto opened = internal::open_checkpoint(folder.path());
  ASSERT_EQ(opened.index.files.size(), 1);
  EXPECT_EQ(opened.index.files[0].name, "model.safetensors");
  EXPECT_EQ(internal::open_checkpoint(folder.path() / "model.fp16.safetensors").index.tensors[0].dtype, at::kHalf);
}

TEST(Foreign, OneFileComesBeforeAnOlderIndexOfSeveral) {
  const TemporaryFolder folder;
  write_file(folder.path() / "model-00001-of-00001.safetensors", {{"old", {2}, ""}});
  write_text(folder.path() / "model.safetensors.index.json", R"({"weight_map":{"old":"model-00001-of-00001.safetensors"}})");
  EXPECT_EQ(internal::open_checkpoint(folder.path()).index.tensors.at(0).name, "old");
  write_file(folder.path() / "model.safetensors", {{"new", {2}, ""}});
  const auto tensors = internal::open_checkpoint(folder.path()).index.tensors;
  ASSERT_EQ(tensors.size(), 1);
  EXPECT_EQ(tensors[0].name, "new");
}

TEST(Foreign, AnIndexThatDoesNotFitItsFilesIsAnError) {
  const auto error_with = [](const std::string& weight_map) {
    const TemporaryFolder folder;
    write_file(folder.path() / "a.safetensors", {{"w", {2}, ""}});
    write_file(folder.path() / "b.safetensors", {{"v", {2}, ""}});
    write_text(folder.path() / "model.safetensors.index.json", "{\"weight_map\":" + weight_map + "}");
    return error_in(folder.path());
  };
  EXPECT_EQ(error_with(R"({"w":"a.safetensors","v":"b.safetensors"})"), "no error");
  EXPECT_EQ(error_with(R"({"w":"a.safetensors"})"), "no error"); // a file that is not listed is not read
  EXPECT_THAT(error_with(R"({"w":"a.safetensors","v":"a.safetensors"})"), HasSubstr("tensor \"v\" is not in a.safetensors"));
  EXPECT_THAT(error_with(R"({"w":"b.safetensors","v":"a.safetensors"})"),
              HasSubstr("tensor \"w\" is listed in b.safetensors and lies in a.safetensors"));
  EXPECT_THAT(error_with(R"({"w":"a.safetensors","v":"b.safetensors","x":"b.safetensors"})"),
              HasSubstr("tensor \"x\" is not in b.safetensors"));
  EXPECT_THAT(error_with(R"({"v":"a.safetensors"})"), HasSubstr("tensor \"w\" of a.safetensors is not listed"));
  EXPECT_THAT(error_with(R"({"w":"../a.safetensors"})"), HasSubstr("weight_map.w is not the name of a safetensors file"));
  EXPECT_THAT(error_with(R"({"w":"c.safetensors"})"), HasSubstr("c.safetensors: No such file"));
  EXPECT_THAT(error_with("[]"), HasSubstr("weight_map is not an object"));
}

TEST(Foreign, OursWithoutItsIndexIsTorn) {
  const TemporaryFolder folder;
  StateDict state;
  state.add("w", torch::ones({2}));
  save(state, folder.path() / "c");
  std::filesystem::remove(folder.path() / "c" / "index.json");
  EXPECT_THAT(error_in(folder.path() / "c"), HasSubstr("c is not a complete checkpoint: it has no index.json"));
  EXPECT_THAT(error_in(folder.path() / "c" / "shard-00001-model-00001-of-00001.safetensors"), HasSubstr("it has no index.json"));
}

TEST(HuggingFace, ConvertsAndSplits) {
  const TemporaryFolder folder;
  StateDict state;
  state.add("a", torch::tensor({1.0F, 2.5F}), {"tied"});
  state.add("b", torch::arange(3));
  state.add("empty", torch::zeros({0, 2}));
  HuggingFaceOptions options;
  options.dtype = at::kBFloat16;
  options.max_file_bytes = 1;
  save_hugging_face(state, folder.path() / "c", options);
  EXPECT_TRUE(std::filesystem::exists(folder.path() / "c" / "model-00002-of-00002.safetensors"));
  const auto contents = internal::open_checkpoint(folder.path() / "c").index.contents();
  EXPECT_EQ(contents.tensors.at("a").dtype, at::kBFloat16);
  EXPECT_EQ(contents.tensors.at("b").dtype, at::kLong);
  EXPECT_EQ(contents.tensors.at("empty").sizes, (std::vector<int64_t>{0, 2}));
  EXPECT_EQ(contents.tensors.size(), 3);
  LoadOptions load_options;
  load_options.cast = true;
  state.tensor("a").zero_();
  load(state, folder.path() / "c", load_options);
  EXPECT_TRUE(torch::equal(state.tensor("a"), torch::tensor({1.0F, 2.5F})));
  state.set("step", 1);
  EXPECT_THAT(error_of([&] { save_hugging_face(state, folder.path() / "d"); }),
              HasSubstr("holds no values, and the state has \"step\""));
}

TEST(HuggingFace, WeightsAreNotCutToIntegers) {
  const TemporaryFolder folder;
  StateDict state;
  state.add("w", torch::full({2}, 0.5));
  EXPECT_THAT(error_of([&] { save_hugging_face(state, folder.path() / "c", {.dtype = at::kLong}); }),
              HasSubstr("HuggingFaceOptions::dtype is Long, which is no floating-point dtype"));
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(HuggingFace, AnEightBitWeightIsNotConvertedWithoutItsScale) {
  for (const std::string suffix : {"_scale_inv", "_scale"}) {
    const TemporaryFolder folder;
    StateDict saved, state, stored;
    saved.add("w", torch::full({2, 2}, 6.0).to(at::kFloat8_e4m3fn));
    saved.add("w" + suffix, torch::full({1, 1}, 0.5));
    save_hugging_face(saved, folder.path() / "m");
    state.add("w", torch::zeros({2, 2}));
    LoadOptions options{.allow_unused = true, .cast = true};
    EXPECT_THAT(error_of([&] { load(state, folder.path() / "m", options); }),
                HasSubstr("\"w\" is Float8_e4m3fn in the checkpoint, and a load does not multiply it by its scale \"w" + suffix +
                          "\": read both with read_state_dict"));
    EXPECT_TRUE(torch::equal(state.tensor("w"), torch::zeros({2, 2})));
    stored.add("w", torch::zeros({2, 2}).to(at::kFloat8_e4m3fn));
    load(stored, folder.path() / "m", options);
    EXPECT_TRUE(torch::equal(stored.tensor("w").to(at::kFloat), torch::full({2, 2}, 6.0)));
    options.filter = [](const std::string& name) { return name == "w"; };
    load(state, folder.path() / "m", options);
    EXPECT_TRUE(torch::equal(state.tensor("w"), torch::full({2, 2}, 6.0)));
  }
}

TEST(HuggingFace, AnEmptyStateIsOneEmptyFile) {
  const TemporaryFolder folder;
  save_hugging_face({}, folder.path() / "c");
  EXPECT_NO_THROW(load(StateDict(), folder.path() / "c"));
}

} // namespace
} // namespace tessera::checkpoint::foreign_test
