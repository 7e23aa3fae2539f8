// Checkpoints in a storage of the program's own, with faults in it.
#include <gmock/gmock.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/checkpointer.h>
#include <tessera/checkpoint/formats/index.h>
#include <tessera/checkpoint/read_state_dict.h>
#include <tessera/collectives/run_ranks.h>
#include <torch/torch.h>

#include <chrono>
#include <thread>

#include <tessera/tests/checkpoint/sharded_training.h>
#include <tessera/tests/checkpoint/shared_folder.h>
#include <tessera/tests/checkpoint/shared_memory_storage.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/scoped_environment.h>
#include <tessera/tests/support/temporary_folder.h>
#include <tessera/tests/support/test_device.h>

namespace tessera::checkpoint::storage_test {
namespace {

using ::testing::ElementsAre;
using testing::error_of;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::SharedFolder;
using testing::SharedMemoryStorage;
using testing::Training;

int rank() { return process_context().rank(); }
int last_rank() { return process_context().world_size() - 1; }

// Each rank's own storage to objects that all see.
struct SharedStorage {
  SharedFolder folder{"/dev/shm"};
  SharedMemoryStorage storage{folder.path()};

  std::vector<std::string> names(const std::string& prefix = "") {
    SharedFolder::barrier();
    auto names = storage.list(prefix);
    std::ranges::sort(names);
    SharedFolder::barrier();
    return names;
  }
};

void put(Storage& storage, const std::string& object, const std::string& text) {
  const auto writer = storage.create(object);
  writer->append(text.data(), text.size());
  writer->close();
}

std::string text_of(const Storage& storage, const std::string& object) {
  std::string text(static_cast<size_t>(*storage.size(object)), '\0');
  storage.read(object, 0, text.data(), text.size());
  return text;
}

// On rank 0, before any goes on.
void on_rank0(const std::function<void()>& change) {
  SharedFolder::barrier();
  if (rank() == 0) change();
  SharedFolder::barrier();
}

StateDict numbers(double value) {
  StateDict state;
  const auto mesh = init_device_mesh(testing::test_device_type(), {process_context().world_size()});
  state.add("w", distribute_tensor(torch::full({12, 5}, value), mesh, {Shard{0}}));
  state.add("plain", torch::full({3}, value));
  state.set("step", static_cast<int64_t>(value));
  return state;
}

void expect_numbers(const StateDict& state, double value) {
  EXPECT_TENSORS_EQUAL(testing::whole_tensor(state.tensor("w")), torch::full({12, 5}, value));
  EXPECT_TENSORS_EQUAL(state.tensor("plain"), torch::full({3}, value));
  EXPECT_EQ(state.value<int64_t>("step"), static_cast<int64_t>(value));
}

void expect_holds(const Storage& storage, const std::string& name, double value) {
  auto state = numbers(0);
  load(state, storage, name);
  expect_numbers(state, value);
}

TEST(Storage, TrainingsAreSavedAndGoOn) {
  SharedStorage shared;
  for (const auto& strategy : testing::strategies(process_context().world_size())) {
    SCOPED_TRACE(strategy);
    Training saved(strategy, 1), loaded(strategy, 2);
    saved.step(0);
    save(saved.state(), shared.storage, "run/" + strategy);
    load(loaded.state(), shared.storage, "run/" + strategy);
    testing::expect_same(loaded.state(), saved.state());
    EXPECT_EQ(loaded.step(1), saved.step(1));
    EXPECT_THAT(verify(shared.storage, "run/" + strategy), IsEmpty());
  }
}

TEST(Storage, HoldsTheBytesOfAFolder) {
  SharedStorage shared;
  const SharedFolder folder;
  save(numbers(3), shared.storage, "c");
  save(numbers(3), folder.path() / "c");
  SharedFolder::barrier();
  std::vector<std::string> in_storage, in_folder;
  for (const auto& name : shared.storage.list("c/data-")) in_storage.push_back(text_of(shared.storage, name));
  for (const auto& entry : std::filesystem::directory_iterator(folder.path() / "c")) {
    if (entry.path().extension() == ".safetensors") in_folder.push_back(testing::read_text(entry.path()));
  }
  EXPECT_THAT(in_storage, ::testing::UnorderedElementsAreArray(in_folder));
}

TEST(Storage, ANameIsReplacedOnlyWhenAsked) {
  SharedStorage shared;
  save(numbers(1), shared.storage, "c");
  EXPECT_THAT(error_of([&] { save(numbers(2), shared.storage, "c"); }), HasSubstr("c exists already"));
  expect_holds(shared.storage, "c", 1);
  const auto before = shared.names();
  save(numbers(2), shared.storage, "c", {.overwrite = true});
  expect_holds(shared.storage, "c", 2);
  EXPECT_EQ(shared.names().size(), before.size()); // the old data is gone
  for (const auto* name : {"", "/c", "c/"})
    EXPECT_THAT(error_of([&] { save(numbers(2), shared.storage, name); }), HasSubstr("is no name of a checkpoint"));
}

TEST(Storage, NamesThatDifferBetweenRanksAreAnErrorAndTheNextSaveWorks) {
  if (last_rank() == 0) GTEST_SKIP() << "one rank cannot differ";
  SharedStorage shared;
  EXPECT_THAT(error_of([&] { save(numbers(1), shared.storage, rank() == last_rank() ? "odd" : "even"); }),
              HasSubstr(c10::str("rank ", last_rank(), ": start to save odd")));
  EXPECT_THAT(shared.names(), IsEmpty());
  save(numbers(2), shared.storage, "c");
  expect_holds(shared.storage, "c", 2);
}

TEST(Storage, TheRanksOfAMeshSaveWhileTheOthersGoOn) {
  SharedStorage shared;
  std::vector<int64_t> low, high;
  for (int64_t r = 0; r <= last_rank(); ++r) (2 * r <= last_rank() ? low : high).push_back(r);
  const auto mesh_of = [](const std::vector<int64_t>& ranks) {
    return make_device_mesh(testing::test_device_type(), {static_cast<int64_t>(ranks.size())}, ranks);
  };
  const bool is_low = std::ranges::find(low, rank()) != low.end();
  const auto own = mesh_of(is_low ? low : high);
  const std::string root = is_low ? "low/" : "high/";
  const auto state_with = [&](double value) {
    StateDict state;
    state.add("w", distribute_tensor(torch::full({12, 5}, value), own, {Shard{0}}));
    return state;
  };
  const double value = is_low ? 1 : 2;
  for (int step = 1; step <= 3; ++step)
    save(state_with(value), shared.storage, c10::str(root, "step-", step), {.keep_last = 2, .mesh = own});
  {
    Checkpointer checkpointer(own);
    checkpointer.save(state_with(value + 2), shared.storage, root + "step-4", {.keep_last = 2});
    checkpointer.wait();
  }
  EXPECT_EQ(latest(shared.storage, root), root + "step-4");
  auto state = state_with(0);
  load(state, shared.storage, root + "step-4", {.mesh = own});
  EXPECT_TENSORS_EQUAL(DTensor(state.tensor("w")).full_tensor(), torch::full({12, 5}, value + 2));
  SharedFolder::barrier();
  for (const auto& [name, expected] : {std::pair("low/step-4", 3.0), std::pair("high/step-4", 4.0)}) {
    if (high.empty() && expected == 4) continue;
    EXPECT_TENSORS_EQUAL(read_state_dict(shared.storage, name).tensor("w"), torch::full({12, 5}, expected));
  }
}

TEST(Storage, LatestAndKeepLast) {
  SharedStorage shared;
  EXPECT_EQ(latest(shared.storage), "");
  save(numbers(7), shared.storage, "run/best");
  for (int step = 1; step <= 4; ++step) {
    save(numbers(step), shared.storage, c10::str("run/step-", step), {.keep_last = 2});
    EXPECT_EQ(latest(shared.storage, "run/"), c10::str("run/step-", step));
    SharedFolder::barrier();
  }
  save(numbers(5), shared.storage, "other");
  EXPECT_EQ(latest(shared.storage, "run/"), "run/step-4");
  EXPECT_EQ(latest(shared.storage), "other");
  EXPECT_THAT(shared.names("run/step-1"), IsEmpty());
  EXPECT_THAT(shared.names("run/step-2"), IsEmpty());
  expect_holds(shared.storage, "run/step-3", 3);
  expect_holds(shared.storage, "run/best", 7);
  EXPECT_THAT(error_of([&] { save(numbers(1), shared.storage, "best", {.keep_last = 2}); }), HasSubstr("has none"));
}

TEST(Storage, KeepLastLeavesNamesThatDifferInMoreThanTheLastNumber) {
  SharedStorage shared;
  save(numbers(1), shared.storage, "run/stage0-step-1");
  for (int step = 1; step <= 2; ++step) save(numbers(2), shared.storage, c10::str("run/stage1-step-", step), {.keep_last = 1});
  EXPECT_THAT(shared.names("run/stage1-step-1"), IsEmpty());
  expect_holds(shared.storage, "run/stage0-step-1", 1);
}

TEST(Storage, IndexesOfOthersAndDamagedOnesArePassedOver) {
  SharedStorage shared;
  auto& storage = shared.storage;
  const auto damage = [&](const std::string& name) {
    on_rank0([&] { put(storage, name + "/index.json", text_of(storage, name + "/index.json") + " "); });
  };
  save(numbers(0), storage, "run/step-0");
  damage("run/step-0");
  const auto left = shared.names("run/step-0/");
  const std::vector<std::string> others{"run/step-7/index.json", "run/notes/deep/index.json", "index.json"};
  on_rank0([&] {
    for (const auto& name : others) put(storage, name, "{}");
  });
  for (int step = 1; step <= 3; ++step) save(numbers(step), storage, c10::str("run/step-", step), {.keep_last = 1});
  EXPECT_EQ(latest(storage, "run/"), "run/step-3");
  EXPECT_EQ(latest(storage), "run/step-3");
  EXPECT_EQ(shared.names("run/step-0/"), left);
  EXPECT_THAT(shared.names("run/step-1/"), IsEmpty());
  EXPECT_THAT(shared.names("run/step-2/"), IsEmpty());
  for (const auto& name : others) EXPECT_EQ(text_of(storage, name), "{}");
  // Not over the newest one.
  damage("run/step-3");
  EXPECT_THAT(error_of([&] { latest(storage, "run/"); }),
              ::testing::AllOf(HasSubstr("run/step-3/index.json: damaged"), HasSubstr("No whole checkpoint beside it is newer")));
  save(numbers(4), storage, "run/step-4");
  EXPECT_EQ(latest(storage, "run/"), "run/step-4");
}

TEST(Storage, KeepLastAsksForItsSeriesAlone) {
  SharedStorage shared;
  save(numbers(1), shared.storage, "best");
  shared.storage.fault = [](const std::string& operation, const std::string& object) {
    if (operation == "list") EXPECT_THAT(object, ::testing::StartsWith("step-"));
    EXPECT_THAT(object, ::testing::Not(::testing::StartsWith("best")));
  };
  for (int step = 1; step <= 3; ++step) save(numbers(step), shared.storage, c10::str("step-", step), {.keep_last = 2});
  shared.storage.fault = nullptr;
  EXPECT_THAT(shared.names("step-1"), IsEmpty());
  expect_holds(shared.storage, "best", 1);
}

TEST(Storage, TheLastOfASeriesIsTheLatestAlsoWhenTheClockWasSetBack) {
  for (const bool has_tensors : {true, false}) { // without any, the index is the only object
    SharedStorage shared;
    const auto state_of = [&](int step) {
      auto state = numbers(step);
      if (!has_tensors) state.erase_if([](const auto& entry) { return entry.is_tensor(); });
      return state;
    };
    save(state_of(3), shared.storage, "step-3");
    on_rank0([&] {
      auto index = internal::parse_index(text_of(shared.storage, "step-3/index.json"), "step-3");
      index.saved_at += int64_t{3600} * 1'000'000;
      for (auto& file : index.files) {
        const auto old = "step-3/" + file.name;
        file.name = c10::str("data-", index.saved_at, file.name.substr(file.name.find('-', 5)));
        put(shared.storage, "step-3/" + file.name, text_of(shared.storage, old));
        shared.storage.remove(old);
      }
      put(shared.storage, "step-3/index.json", internal::encode_index(index));
    });
    for (const int step : {2, 1}) {
      save(state_of(step), shared.storage, c10::str("step-", step), {.keep_last = 2});
      EXPECT_EQ(latest(shared.storage), c10::str("step-", step));
      SharedFolder::barrier();
    }
    EXPECT_THAT(shared.names("step-3"), IsEmpty());
    auto loaded = state_of(0);
    load(loaded, shared.storage, "step-2");
    EXPECT_EQ(loaded.value<int64_t>("step"), 2);
  }
}

TEST(Storage, ALoadOfDifferentCheckpointsChangesNothing) {
  if (last_rank() == 0) GTEST_SKIP() << "one rank cannot differ";
  SharedStorage first, second;
  save(numbers(1), first.storage, "c");
  save(numbers(2), second.storage, "c");
  SharedFolder::barrier();
  auto state = numbers(0);
  const auto& mine = rank() == last_rank() ? second.storage : first.storage;
  EXPECT_THAT(error_of([&] { load(state, mine, "c"); }),
              HasSubstr(c10::str("c is not the same checkpoint on rank ", last_rank(), " as on rank 0")));
  expect_numbers(state, 0);
}

TEST(Storage, TheCheckpointerSavesThere) {
  SharedStorage shared;
  Checkpointer checkpointer;
  auto state = numbers(1);
  checkpointer.save(state, shared.storage, "step-1");
  checkpointer.save(numbers(2), shared.storage, "step-2");
  checkpointer.wait();
  expect_holds(shared.storage, "step-1", 1);
  expect_holds(shared.storage, "step-2", 2);
  shared.storage.fault = [](const std::string& operation, const std::string&) {
    if (operation == "close" && rank() == last_rank()) throw std::runtime_error("no space");
  };
  checkpointer.save(state, shared.storage, "step-3");
  EXPECT_THAT(error_of([&] { checkpointer.wait(); }), HasSubstr(c10::str("rank ", last_rank(), ": no space")));
  EXPECT_THAT(shared.names("step-3"), IsEmpty());
}

TEST(Storage, UnknownStatesAreReadFromIt) {
  SharedStorage shared;
  save(numbers(4), shared.storage, "c");
  expect_numbers(read_state_dict(shared.storage, "c"), 4);
  EXPECT_EQ(read_state_dict(shared.storage, "c", {.prefix = "pl"}).size(), 1);
}

TEST(StorageFaults, OnOneRankAreErrorsOnAllAndLeaveNothing) {
  for (const std::string failing : {"append", "close"}) {
    for (const int at : {0, last_rank()}) {
      for (const bool overwrite : {false, true}) {
        SCOPED_TRACE(c10::str(failing, " on rank ", at, overwrite ? ", replacing" : ""));
        SharedStorage shared;
        if (overwrite) save(numbers(1), shared.storage, "c");
        const auto before = shared.names();
        shared.storage.fault = [&](const std::string& operation, const std::string& object) {
          if (operation == failing && rank() == at) throw std::runtime_error("no space for " + object);
        };
        const auto error = error_of([&] { save(numbers(2), shared.storage, "c", {.overwrite = overwrite}); });
        EXPECT_THAT(error, HasSubstr(c10::str("cannot save c: rank ", at, ": no space for c/data-")));
        shared.storage.fault = nullptr;
        EXPECT_EQ(shared.names(), before);
        if (overwrite) expect_holds(shared.storage, "c", 1);
      }
    }
  }
}

TEST(StorageFaults, OfTheIndexLeaveNoCheckpoint) {
  for (const bool overwrite : {false, true}) {
    SharedStorage shared;
    if (overwrite) save(numbers(1), shared.storage, "c");
    const auto before = shared.names();
    shared.storage.fault = [](const std::string& operation, const std::string& object) {
      if (operation == "close" && object.ends_with("index.json")) throw std::runtime_error("no space");
    };
    EXPECT_THAT(error_of([&] { save(numbers(2), shared.storage, "c", {.overwrite = overwrite}); }),
                HasSubstr("cannot commit c: rank 0: no space"));
    shared.storage.fault = nullptr;
    EXPECT_EQ(shared.names(), before);
    if (overwrite) expect_holds(shared.storage, "c", 1);
    // An index that arrived, though the answer did not, is there.
    shared.storage.answer_lost = "c/index.json";
    save(numbers(3), shared.storage, "c", {.overwrite = overwrite});
    expect_holds(shared.storage, "c", 3);
  }
}

/// Rank 0 writes the index for longer than the others wait: these cannot know that it will be there.
TEST(StorageFaults, ACommitThatIsCutOffLeavesOneWholeCheckpoint) {
  if (!testing::tests_the_cpu()) GTEST_SKIP() << "ranks in threads exchange CPU tensors";
  for (const bool overwrite : {false, true}) {
    const testing::TemporaryFolder folder;
    const auto save_slowly = [&] {
      SharedMemoryStorage storage(folder.path());
      if (overwrite) save(numbers(1), storage, "c");
      storage.fault = [](const std::string& operation, const std::string& object) {
        if (operation == "close" && object.ends_with("index.json")) std::this_thread::sleep_for(std::chrono::seconds(2));
      };
      const auto error = error_of([&] { save(numbers(2), storage, "c", {.overwrite = overwrite}); });
      EXPECT_THAT(error, HasSubstr("cannot commit c, which ranks 0, 1 must each call"));
    };
    {
      const testing::ScopedEnvironment timeout("TESSERA_TIMEOUT_SECONDS", "1");
      run_ranks_as_threads(2, save_slowly);
    }
    run_ranks_as_threads(1, [&] {
      const SharedMemoryStorage storage(folder.path());
      EXPECT_EQ(latest(storage), "c");
      expect_holds(storage, "c", 2);
    });
  }
}

TEST(StorageFaults, AnIndexThatMayBeThereKeepsItsData) {
  SharedStorage shared;
  save(numbers(1), shared.storage, "c");
  bool is_gone = false;
  shared.storage.answer_lost = "c/index.json";
  shared.storage.fault = [&](const std::string& operation, const std::string& object) {
    if (!object.ends_with("index.json")) return;
    is_gone |= operation == "close";
    if (is_gone && operation == "read") throw std::runtime_error("the storage is gone");
  };
  EXPECT_THAT(error_of([&] { save(numbers(2), shared.storage, "c", {.overwrite = true}); }),
              HasSubstr("cannot commit c: rank 0: the answer was lost"));
  shared.storage.fault = nullptr;
  expect_holds(shared.storage, "c", 2);
  shared.storage.answer_lost.clear();
  save(numbers(3), shared.storage, "c", {.overwrite = true}); // removes what lies there of both
  expect_holds(shared.storage, "c", 3);
}

TEST(StorageFaults, WithoutATextAreErrorsToo) {
  SharedStorage shared;
  save(numbers(1), shared.storage, "c");
  const auto before = shared.names();
  shared.storage.fault = [](const std::string& operation, const std::string& object) {
    if (operation == "close" && object.ends_with("index.json")) throw std::runtime_error("");
  };
  EXPECT_THAT(error_of([&] { save(numbers(2), shared.storage, "c", {.overwrite = true}); }),
              HasSubstr("cannot commit c: rank 0: std::runtime_error without a text"));
  shared.storage.fault = [](const std::string& operation, const std::string&) {
    if (operation == "append" && rank() == last_rank()) throw 7; // NOLINT(hicpp-exception-baseclass)
  };
  EXPECT_THAT(error_of([&] { save(numbers(2), shared.storage, "c", {.overwrite = true}); }),
              HasSubstr(c10::str("rank ", last_rank(), ": an exception that is no std::exception")));
  shared.storage.fault = nullptr;
  EXPECT_EQ(shared.names(), before);
  expect_holds(shared.storage, "c", 1);
}

TEST(StorageFaults, TruncatedObjectsAreFoundAtTheSaveAndAtTheLoad) {
  for (const std::string object : {"shard-00001", "index.json"}) {
    SharedStorage shared;
    shared.storage.truncated = object;
    EXPECT_THAT(error_of([&] { save(numbers(1), shared.storage, "c"); }), HasSubstr("bytes in the storage, where "));
    EXPECT_THAT(shared.names(), IsEmpty());
    EXPECT_THAT(error_of([&] { expect_holds(shared.storage, "c", 1); }), HasSubstr("c is not a complete checkpoint"));
  }
  SharedStorage shared;
  save(numbers(1), shared.storage, "c");
  on_rank0([&] {
    const auto name = shared.storage.list("c/data-")[0];
    auto data = text_of(shared.storage, name);
    data.pop_back();
    put(shared.storage, name, data);
  });
  EXPECT_THAT(error_of([&] { expect_holds(shared.storage, "c", 1); }), HasSubstr("where the checkpoint wrote"));
  EXPECT_THAT(verify(shared.storage, "c"), ElementsAre(HasSubstr("where the checkpoint wrote")));
}

TEST(StorageFaults, OfReadsAreErrorsOnEveryRank) {
  SharedStorage shared;
  save(numbers(1), shared.storage, "c");
  EXPECT_THAT(error_of([&] { expect_holds(shared.storage, "none", 1); }), HasSubstr("the storage has no none/index.json"));
  shared.storage.fault = [](const std::string& operation, const std::string& object) {
    if (operation == "read" && rank() == last_rank() && !object.ends_with("index.json")) throw std::runtime_error("timed out");
  };
  EXPECT_THAT(error_of([&] { expect_holds(shared.storage, "c", 1); }),
              ::testing::MatchesRegex(c10::str(".*cannot load c: rank ", last_rank(), ": cannot read c/data-.*: timed out.*")));
  shared.storage.fault = nullptr;
  expect_holds(shared.storage, "c", 1);
}

TEST(StorageFaults, AreFindingsOfVerify) {
  SharedStorage shared;
  save(numbers(1), shared.storage, "c");
  const auto objects = shared.names("c/data-");
  shared.storage.fault = [](const std::string& operation, const std::string& object) {
    if (operation == "size" && object.starts_with("c/data-")) throw std::runtime_error("timed out");
  };
  const auto findings = verify(shared.storage, "c");
  ASSERT_EQ(findings.size(), objects.size());
  EXPECT_THAT(findings, ::testing::Each(::testing::MatchesRegex("cannot read the size of c/data-.*: timed out")));
}

TEST(StorageFaults, ARemovalGoesOnAfterAnError) {
  for (const std::string stuck : {"step-1", "step-4"}) { // of the series, and what the save replaces
    SharedStorage shared;
    for (int step = 1; step <= 4; ++step) save(numbers(step), shared.storage, c10::str("step-", step));
    std::string failing;
    shared.storage.fault = [&](const std::string& operation, const std::string& object) {
      if (operation != "remove" || !object.starts_with(stuck + "/data-")) return;
      if (failing.empty()) failing = object;
      if (object == failing) throw std::runtime_error("no rights");
    };
    const auto before = shared.names("step-4").size();
    EXPECT_THAT(error_of([&] { save(numbers(5), shared.storage, "step-4", {.overwrite = true, .keep_last = 1}); }),
                HasSubstr("cannot tidy up after the save of step-4: rank 0: no rights"));
    shared.storage.fault = nullptr;
    EXPECT_EQ(shared.names("step-1").size(), stuck == "step-1" ? 1 : 0);
    EXPECT_THAT(shared.names("step-2"), IsEmpty());
    EXPECT_THAT(shared.names("step-3"), IsEmpty());
    EXPECT_EQ(shared.names("step-4").size(), before + (stuck == "step-4" ? 1 : 0));
    expect_holds(shared.storage, "step-4", 5);
  }
}

TEST(StorageFaults, WhatAKilledSaveLeftIsRemovedByTheNext) {
  SharedStorage shared;
  on_rank0([&] {
    for (const auto* name :
         {"c/data-1-2-shard-00009-model-00001-of-00001.safetensors", "c/notes.txt", "c/sub/data-3-x.safetensors"})
      put(shared.storage, name, "x");
  });
  EXPECT_EQ(latest(shared.storage), "");
  save(numbers(1), shared.storage, "c");
  expect_holds(shared.storage, "c", 1);
  EXPECT_THAT(shared.names("c/data-1-2-"), IsEmpty());
  EXPECT_THAT(shared.names("c/notes.txt"), ElementsAre("c/notes.txt"));
  EXPECT_THAT(shared.names("c/sub/"), ElementsAre("c/sub/data-3-x.safetensors"));
}

} // namespace
} // namespace tessera::checkpoint::storage_test
