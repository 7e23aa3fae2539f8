// Checkpoints among others in one folder: where a save goes, what it leaves and removes, and which is the latest.
#include <c10/util/ScopeExit.h>
#include <gmock/gmock.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/formats/index.h>
#include <tessera/checkpoint/hugging_face.h>
#include <torch/torch.h>

#include <atomic>
#include <set>
#include <thread>

#include <tessera/tests/checkpoint/folder_entries.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/temporary_folder.h>

namespace tessera::checkpoint::catalog_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using testing::error_of;
using ::testing::HasSubstr;
using testing::names_in;
using testing::read_text;
using testing::TemporaryFolder;
using ::testing::UnorderedElementsAre;
using testing::write_text;

StateDict example() {
  StateDict state;
  state.add("w", torch::ones({3}));
  state.set("step", 1);
  return state;
}

StateDict weights(double value) {
  StateDict state;
  state.add("w", torch::full({3}, value));
  return state;
}

TEST(Folder, AnExportLeavesTheOtherFilesOfItsFolder) {
  const TemporaryFolder folder;
  const auto model = folder.path() / "model";
  const auto weight = [&] {
    auto loaded = weights(0);
    load(loaded, model);
    return loaded.tensor("w")[0].item<double>();
  };
  std::filesystem::create_directory(model);
  write_text(model / "adapter_config.json", "{}");
  write_text(folder.path() / "shared.json", "[]");
  std::filesystem::create_symlink("../shared.json", model / "tokenizer.json");
  save_hugging_face(weights(1), model); // replaces nothing
  EXPECT_EQ(weight(), 1);
  EXPECT_THAT(error_of([&] { save_hugging_face(weights(2), model); }), HasSubstr("model exists already"));
  save_hugging_face(weights(2), model, {.overwrite = true});
  EXPECT_EQ(weight(), 2);
  EXPECT_THAT(names_in(model), UnorderedElementsAre("adapter_config.json", "tokenizer.json", "model.safetensors"));
  EXPECT_EQ(read_text(model / "adapter_config.json"), "{}");
  EXPECT_EQ(read_text(model / "tokenizer.json"), "[]");
  EXPECT_THAT(names_in(folder.path()), UnorderedElementsAre("model", "shared.json"));
  // Not a whole tree, and nothing in place of a file.
  std::filesystem::create_directory(model / "logs");
  for (const bool overwrite : {false, true}) {
    EXPECT_THAT(error_of([&] { save_hugging_face(weights(3), folder.path(), {.overwrite = overwrite}); }),
                HasSubstr("holds model, which is neither a part of a checkpoint nor a file"));
    EXPECT_THAT(error_of([&] { save_hugging_face(weights(3), folder.path() / "shared.json", {.overwrite = overwrite}); }),
                HasSubstr("shared.json exists already and is no folder"));
  }
  EXPECT_THAT(error_of([&] { save_hugging_face(weights(3), model, {.overwrite = true}); }), HasSubstr("model holds logs"));
  EXPECT_EQ(weight(), 2);
}

TEST(Folder, AnExportReplacesWeightsOfItsOwnNameAlone) {
  const TemporaryFolder folder;
  const auto base = folder.path() / "base";
  save_hugging_face(weights(1), base);
  const HuggingFaceOptions adapter{.file_name = "adapter_model.safetensors"};
  save_hugging_face(weights(2), base, adapter); // replaces nothing
  EXPECT_THAT(error_of([&] { save_hugging_face(weights(3), base, adapter); }), HasSubstr("base exists already"));
  const std::vector<std::string> others{"adapter_model-of-2.safetensors", "adapter_model-old.safetensors", "text"};
  for (const auto& name : others) write_text(base / name, "of others");
  StateDict two = weights(4);
  two.add("v", torch::ones({3}));
  auto expected = others;
  expected.emplace_back("model.safetensors");
  for (const bool several : {true, false}) {
    save_hugging_face(two, base, {.file_name = adapter.file_name, .max_file_bytes = several ? 1 : 100, .overwrite = true});
    auto names = expected;
    if (several) {
      names.insert(names.end(), {"adapter_model-00001-of-00002.safetensors", "adapter_model-00002-of-00002.safetensors",
                                 "adapter_model.safetensors.index.json"});
    } else {
      names.push_back(adapter.file_name);
    }
    EXPECT_THAT(names_in(base), ::testing::UnorderedElementsAreArray(names));
  }
  auto loaded = weights(0);
  load(loaded, base);
  EXPECT_EQ(loaded.tensor("w")[0].item<double>(), 1);
}

TEST(Folder, AnExportLeavesCheckpointsOfOtherFormats) {
  const TemporaryFolder folder;
  save(weights(1), folder.path() / "c");
  for (const bool overwrite : {false, true}) {
    EXPECT_THAT(error_of([&] { save_hugging_face(weights(2), folder.path() / "c", {.overwrite = overwrite}); }),
                HasSubstr("c holds index.json, a part of a checkpoint in another format"));
  }
  EXPECT_TRUE(verify(folder.path() / "c").empty());
}

TEST(Folder, AReplacedFolderKeepsItsPermissions) {
  const TemporaryFolder folder;
  const auto model = folder.path() / "model", step = folder.path() / "step";
  std::filesystem::create_directory(model);
  save(example(), step);
  for (const auto mode : {0700, 02775}) {
    for (const auto& path : {model, step}) std::filesystem::permissions(path, std::filesystem::perms(mode));
    save_hugging_face(weights(1), model, {.overwrite = true});
    save(example(), step, {.overwrite = true});
    for (const auto& path : {model, step})
      EXPECT_EQ(std::filesystem::status(path).permissions(), std::filesystem::perms(mode)) << path;
  }
}

TEST(Folder, TheCurrentFolderIsNotReplaced) {
  const TemporaryFolder folder;
  const auto before = std::filesystem::current_path();
  const auto back = c10::make_scope_exit([&] { std::filesystem::current_path(before); });
  save(example(), folder.path() / "c");
  std::filesystem::current_path(folder.path() / "c");
  EXPECT_THAT(error_of([&] { save(example(), ".", {.overwrite = true}); }), HasSubstr("c is the current folder"));
  std::filesystem::create_directory(folder.path() / "model");
  std::filesystem::current_path(folder.path() / "model");
  write_text("config.json", "{}");
  EXPECT_THAT(error_of([&] { save_hugging_face(weights(1), "."); }), HasSubstr("model is the current folder"));
  save_hugging_face(weights(1), "inner");
  EXPECT_THAT(names_in("."), UnorderedElementsAre("config.json", "inner"));
  EXPECT_THAT(names_in(folder.path()), UnorderedElementsAre("c", "model", "latest"));
}

TEST(Folder, ASaveGoesWhereALoadLooks) {
  const TemporaryFolder folder;
  std::filesystem::create_directories(folder.path() / "real" / "inner");
  std::filesystem::create_directory_symlink("real/inner", folder.path() / "link");
  for (const auto* name : {"link/../c", "link/.././d/", "link/e/.", "link/f"}) {
    SCOPED_TRACE(name);
    save(weights(1), folder.path() / name);
    auto loaded = weights(0);
    load(loaded, folder.path() / name);
    EXPECT_EQ(loaded.tensor("w")[0].item<double>(), 1);
  }
  EXPECT_THAT(names_in(folder.path()), UnorderedElementsAre("real", "link"));
  EXPECT_THAT(names_in(folder.path() / "real"), UnorderedElementsAre("inner", "c", "d", "latest"));
  EXPECT_THAT(names_in(folder.path() / "link"), UnorderedElementsAre("e", "f", "latest"));
}

TEST(Latest, IsTheNewestCompleteCheckpoint) {
  const TemporaryFolder folder;
  EXPECT_EQ(latest(folder.path() / "none"), "");
  EXPECT_EQ(latest(folder.path()), "");
  save({}, folder.path() / "step-9");
  save({}, folder.path() / "step-10");
  save({}, folder.path() / "a-later-one");
  std::filesystem::create_directory(folder.path() / "step-11");
  EXPECT_EQ(latest(folder.path()), folder.path() / "a-later-one");
}

TEST(Latest, ALinkPointsAtTheLastSave) {
  const TemporaryFolder folder;
  for (const int64_t step : {1, 2, 3}) {
    StateDict state, loaded;
    state.set("step", step);
    SaveOptions options;
    options.update_latest = step < 3;
    save(state, folder.path() / std::to_string(step), options);
    loaded.set("step", 0);
    load(loaded, folder.path() / "latest");
    EXPECT_EQ(loaded.value<int64_t>("step"), std::min<int64_t>(step, 2));
  }
}

TEST(Latest, WhatOthersCallSoIsNotReplaced) {
  const TemporaryFolder folder;
  const auto link = folder.path() / "latest";
  write_text(link, "step-7");
  EXPECT_THAT(error_of([&] { save({}, folder.path() / "a"); }), HasSubstr("latest is no symbolic link, so it is not replaced"));
  EXPECT_EQ(read_text(link), "step-7");
  EXPECT_THAT(names_in(folder.path()), ElementsAre("latest"));
  save({}, folder.path() / "a", {.update_latest = false});
  std::filesystem::remove(link);
  std::filesystem::create_symlink("/nonexistent", link);
  save({}, folder.path() / "b");
  EXPECT_EQ(std::filesystem::read_symlink(link), "b");
}

TEST(Latest, PassesOverFoldersOfOthersButNotOverADamagedIndex) {
  const TemporaryFolder folder;
  std::filesystem::create_directories(folder.path() / "odd" / "index.json");
  std::filesystem::create_directory(folder.path() / "web");
  write_text(folder.path() / "web" / "index.json", "{\"name\": 1}");
  save(example(), folder.path() / "a");
  EXPECT_EQ(latest(folder.path()), folder.path() / "a");
  const auto index = folder.path() / "a" / "index.json";
  auto text = read_text(index);
  for (const size_t position : {size_t{3}, text.size() / 2}) {
    text[position] ^= 1;
    write_text(index, text);
    EXPECT_THAT(error_of([&] { latest(folder.path()); }), HasSubstr("a/index.json: "));
    text[position] ^= 1;
  }
}

TEST(Latest, OfWhatCannotBeListedIsAnError) {
  EXPECT_EQ(latest("/nowhere/at/all"), "");
  EXPECT_THAT(error_of([] { latest(std::string(300, 'x')); }), HasSubstr("checkpoint: cannot list xxx"));
}

TEST(Latest, PassesOverADamagedOneThatIsOlder) {
  const TemporaryFolder folder;
  const auto damage = [&](const std::string& name) {
    write_text(folder.path() / name / "index.json", std::string(internal::kIndexStart));
  };
  save(example(), folder.path() / "step-1");
  damage("step-1");
  EXPECT_THAT(error_of([&] { latest(folder.path()); }),
              AllOf(HasSubstr("step-1/index.json: "), HasSubstr("No whole checkpoint beside it is newer")));
  save(example(), folder.path() / "step-2");
  EXPECT_EQ(latest(folder.path()), folder.path() / "step-2");
  save(example(), folder.path() / "step-3");
  damage("step-3");
  const auto later = std::filesystem::last_write_time(folder.path() / "step-2" / "index.json") + std::chrono::seconds(1);
  std::filesystem::last_write_time(folder.path() / "step-3" / "index.json", later);
  EXPECT_THAT(error_of([&] { latest(folder.path()); }), HasSubstr("step-3/index.json: "));
  std::filesystem::remove_all(folder.path() / "step-3");
  EXPECT_EQ(latest(folder.path()), folder.path() / "step-2");
}

// Asks for the latest while another thread saves a hundred times, at last to `last`.
void poll_while_saving(const std::filesystem::path& root, const std::function<void(int)>& save_step, const std::string& last) {
  std::atomic<bool> saving{true};
  std::thread saver([&] {
    for (int step = 1; step <= 100; ++step) save_step(step);
    saving = false;
  });
  int calls = 0, empty = 0;
  std::set<std::string> errors{"no error"};
  for (; saving; ++calls) errors.insert(error_of([&] { empty += latest(root).empty() ? 1 : 0; }));
  saver.join();
  EXPECT_THAT(errors, ElementsAre("no error")) << calls << " calls";
  EXPECT_EQ(empty, 0) << calls << " calls";
  EXPECT_EQ(latest(root), root / last);
}

TEST(Latest, AlwaysFindsOneWhileOthersSaveAndRemove) {
  for (const bool beside_damaged : {false, true}) {
    SCOPED_TRACE(beside_damaged);
    const TemporaryFolder folder;
    if (beside_damaged) {
      std::filesystem::create_directory(folder.path() / "step-0");
      write_text(folder.path() / "step-0" / internal::kIndexName, internal::kIndexStart); // older than all others
    }
    save({}, folder.path() / "step-1", {.overwrite = true});
    poll_while_saving(
        folder.path(), [&](int step) { save({}, folder.path() / c10::str("step-", step), {.overwrite = true, .keep_last = 1}); },
        "step-100");
  }
}

TEST(Latest, AlwaysFindsOneWhileItIsReplaced) {
  const TemporaryFolder folder;
  save({}, folder.path() / "a");
  poll_while_saving(
      folder.path(), [&](int) { save({}, folder.path() / "a", {.overwrite = true}); }, "a");
}

TEST(Latest, IsTheLastOneAlsoWhenTheClockWasSetBack) {
  const TemporaryFolder folder;
  const auto future = folder.path() / "step-3";
  save({}, future);
  auto index = internal::read_index(future);
  index.saved_at += int64_t{3600} * 1'000'000;
  write_text(future / "index.json", internal::encode_index(index));
  save({}, folder.path() / "step-2", {.keep_last = 2});
  EXPECT_EQ(latest(folder.path()), folder.path() / "step-2");
  save({}, folder.path() / "step-1", {.keep_last = 2});
  EXPECT_EQ(latest(folder.path()), folder.path() / "step-1");
  EXPECT_THAT(names_in(folder.path()), UnorderedElementsAre("step-2", "step-1", "latest"));
}

TEST(KeepLast, RemovesTheOldestWithTheirHiddenRemains) {
  const TemporaryFolder folder;
  SaveOptions options;
  options.keep_last = 2;
  std::filesystem::create_directory(folder.path() / "step-0");
  for (const auto* name : {"step-2", "step-1", "step-40", "step-3"}) save({}, folder.path() / name, options);
  EXPECT_THAT(names_in(folder.path()), UnorderedElementsAre("step-40", "step-3", "latest", "step-0"));
  std::filesystem::create_directory(folder.path() / ".x.removing-1-1");
  options.keep_last = 0;
  save({}, folder.path() / "e", options);
  EXPECT_THAT(names_in(folder.path()), UnorderedElementsAre("step-40", "step-3", "e", "latest", "step-0"));
  options.keep_last = -1;
  EXPECT_THAT(error_of([&] { save({}, folder.path() / "f", options); }), HasSubstr("keep_last is -1"));
}

TEST(KeepLast, LeavesWhatIsNoWholeCheckpoint) {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder.path() / "step-0");
  write_text(folder.path() / "step-0" / "index.json", "{\"name\": 1}");
  save(example(), folder.path() / "step-1");
  auto text = read_text(folder.path() / "step-1" / "index.json");
  text.pop_back();
  write_text(folder.path() / "step-1" / "index.json", text);
  for (const auto* name : {"step-2", "step-3", "step-4"}) save(example(), folder.path() / name, {.keep_last = 1});
  EXPECT_THAT(names_in(folder.path()), UnorderedElementsAre("step-0", "step-1", "step-4", "latest"));
}

TEST(KeepLast, LeavesOtherSeries) {
  const TemporaryFolder folder;
  for (const auto* name : {"best", "best-1", "epoch-1"}) save({}, folder.path() / name);
  for (const auto* name : {"step-1", "step-20"}) save({}, folder.path() / name, {.keep_last = 1});
  EXPECT_THAT(names_in(folder.path()), UnorderedElementsAre("best", "best-1", "epoch-1", "step-20", "latest"));
  EXPECT_THAT(error_of([&] { save({}, folder.path() / "last", {.keep_last = 1}); }),
              HasSubstr("keep_last counts checkpoints whose names differ in a number, as step-100 and step-200, and \"last\" has "
                        "none"));
}

TEST(KeepLast, CountsNamesThatDifferInTheLastNumberAlone) {
  const TemporaryFolder folder;
  const std::vector<std::string> others{"stage0-step-2", "llama-8b-step-1", "step-2-final", "1", "stage#-step-2"};
  for (const auto& name : others) save({}, folder.path() / name);
  for (const auto* name : {"stage1-step-2", "llama-70b-step-2", "step-2", "stage1-step-10"})
    save({}, folder.path() / name, {.keep_last = 1});
  auto expected = others;
  expected.insert(expected.end(), {"stage1-step-10", "llama-70b-step-2", "step-2", "latest"});
  EXPECT_THAT(names_in(folder.path()), ::testing::UnorderedElementsAreArray(expected));
  save({}, folder.path() / "2", {.keep_last = 1});
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "1"));
}

} // namespace
} // namespace tessera::checkpoint::catalog_test
