// Shards, gradients and the optimizer's state in files.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <tessera/activations/saved_tensors.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/fsdp/group/parameter_group.h>
#include <tessera/fsdp/meta_init.h>
#include <tessera/offload/file_memory.h>
#include <tessera/optim/step.h>
#include <tessera/training/averaged_model.h>

#include <sys/resource.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <tessera/tests/checkpoint/shared_folder.h>
#include <tessera/tests/checkpoint/small_disk.h>
#include <tessera/tests/fsdp/offload_training.h>
#include <tessera/tests/support/sanitized.h>
#include <tessera/tests/support/simulated_device/simulated_device.h>
#include <tessera/tests/support/temporary_folder.h>

namespace tessera::testing::offload_test {
namespace {

/// The region that this rank's part of a DTensor lies in; null where it lies in memory.
const internal::FileRegion* region_of(const torch::Tensor& tensor) {
  return internal::file_region(*DTensor(tensor).local().storage().unsafeGetStorageImpl());
}

Strategy offloaded(Strategy strategy, const TemporaryFolder& folder) {
  strategy.name += ", in files";
  strategy.options.offload = offload_to_files(folder.path());
  return strategy;
}

TEST(Offload, TrainsToTheBitAsInMemory) {
  const TemporaryFolder folder;
  for (const auto& strategy : strategies()) {
    for (const auto& maker : makers()) {
      if (maker.name != "AdamW" && !strategy.name.starts_with("full")) continue;
      SCOPED_TRACE(strategy.name + ", " + maker.name);
      auto plain = make_training(strategy, maker), files = make_training(offloaded(strategy, folder), maker);
      expect_same(train(files, 0, 4), train(plain, 0, 4));
      expect_same(files.net, plain.net);
      for (const auto& parameter : files.net->parameters()) {
        EXPECT_TRUE(region_of(parameter)) << "the shard";
        EXPECT_TRUE(region_of(parameter.grad())) << "the gradient";
      }
      EXPECT_TRUE(std::filesystem::is_empty(folder.path())) << "the files have no names";
    }
  }
}

TEST(Offload, PutsTheStateOfTheFirstStepIntoFiles) {
  const TemporaryFolder folder;
  auto training = make_training(offloaded(strategies()[0], folder), makers()[1]);
  train(training, 0, 1);
  for (const auto& parameter : training.net->parameters()) {
    const auto& state =
        static_cast<torch::optim::AdamWParamState&>(*training.optimizer->state().at(parameter.unsafeGetTensorImpl()));
    if (DTensor(parameter).local().numel() == 0) continue;
    EXPECT_TRUE(region_of(state.exp_avg()));
    EXPECT_TRUE(region_of(state.exp_avg_sq()));
  }
}

TEST(Offload, CountsAStepOnceThatIsTakenInParts) {
  const TemporaryFolder folder;
  auto training = make_training(offloaded(strategies()[0], folder), makers()[2]);
  train(training, 0, 3);
  EXPECT_EQ(static_cast<Lion&>(*training.optimizer).steps, 3);
}

TEST(Offload, SeesAndShowsTrueValues) {
  const TemporaryFolder folder;
  for (const size_t which : {size_t{0}, strategies().size() - 1}) {
    const auto strategy = strategies()[which];
    SCOPED_TRACE(strategy.name);
    auto plain = make_training(strategy, makers()[1]), files = make_training(offloaded(strategy, folder), makers()[1]);
    int64_t number = 0;
    auto clipped = Clipped::kNo;
    for (const auto& habit : habits()) {
      SCOPED_TRACE(habit.name);
      expect_same(train(files, number, number + 1), train(plain, number, number + 1), clipped);
      ++number;
      for (auto* each : {&files, &plain}) habit.run(*each);
      if (habit.name == "clip") clipped = Clipped::kYes;
      for (size_t i = 0; i < plain.net->parameters().size(); ++i) {
        const auto got = files.net->parameters()[i].grad(), expected = plain.net->parameters()[i].grad();
        ASSERT_EQ(got.defined(), expected.defined());
        if (got.defined()) expect_same({full(got)}, {full(expected)}, clipped);
      }
      expect_same(files.net, plain.net, clipped);
      for (auto* each : {&files, &plain}) step(*each->optimizer);
      expect_same(files.net, plain.net, clipped);
    }
  }
}

TEST(Offload, TrainsInBFloat16) {
  const TemporaryFolder folder;
  auto strategy = strategies()[0];
  strategy.options.mixed_precision = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
  auto plain = make_training(strategy, makers()[1]), files = make_training(offloaded(strategy, folder), makers()[1]);
  expect_same(train(files, 0, 4), train(plain, 0, 4));
  expect_same(files.net, plain.net);
}

TEST(Offload, TrainsWithoutPageLockedMemory) {
  const TemporaryFolder folder;
  auto strategy = strategies()[0];
  auto plain = make_training(strategy, makers()[1]);
  strategy.options.offload = offload_to_files(folder.path(), /*pin_memory=*/false);
  auto files = make_training(strategy, makers()[1]);
  expect_same(train(files, 0, 4), train(plain, 0, 4));
  expect_same(files.net, plain.net);
}

TEST(Offload, AveragesTheWeights) {
  const TemporaryFolder folder;
  auto plain = make_training(strategies()[0], makers()[1]),
       files = make_training(offloaded(strategies()[0], folder), makers()[1]);
  for (auto* each : {&plain, &files}) {
    AveragedModel average(*each->net, ema(0.5));
    for (int64_t number = 0; number < 3; ++number) {
      train(*each, number, number + 1);
      average.update_parameters(*each->net);
    }
    average.copy_to(*each->net);
  }
  expect_same(files.net, plain.net);
}

TEST(Offload, KeepsActivationsInFilesToo) {
  const TemporaryFolder folder;
  const auto on_device = torch::TensorOptions(test_device()).requires_grad(true);
  const auto x = torch::randn({200, 200}, on_device), w = torch::randn({200, 200}, on_device);
  const auto gradients = [&] { return torch::autograd::grad({torch::tanh(x.mm(w)).mm(w).square().sum()}, {x, w}); };
  const auto expected = gradients();
  const auto scope = saved_tensors_in(file_memory(folder.path()));
  expect_same(gradients(), expected);
  EXPECT_THROWS_WITH(file_memory(folder.file("absent")), "No such file or directory");
}

TEST(Offload, SavesAndLoads) {
  const TemporaryFolder folder;
  const SharedFolder shared;
  for (const bool from_files : {false, true}) {
    for (const bool to_files : {false, true}) {
      SCOPED_TRACE(
          c10::str("saved ", from_files ? "from files" : "from memory", ", loaded ", to_files ? "to files" : "to memory"));
      const auto make = [&](bool in_files, size_t which) {
        const auto strategy = strategies()[which];
        return make_training(in_files ? offloaded(strategy, folder) : strategy, makers()[1]);
      };
      auto saved = make(from_files, 0), loaded = make(to_files, strategies().size() / 2);
      train(saved, 0, 2);
      const auto path = shared.path() / c10::str(from_files, to_files);
      checkpoint::save(state_dict(*saved.net, *saved.optimizer), path);
      auto state = state_dict(*loaded.net, *loaded.optimizer);
      checkpoint::load(state, path);
      const auto expected = train(saved, 2, 4), got = train(loaded, 2, 4);
      for (size_t i = 0; i < got.size(); ++i) EXPECT_TENSORS_CLOSE(got[i], expected[i], 1e-5, 1e-6);
    }
  }
}

TEST(Offload, MaterializesAModelOfTheMetaDevice) {
  const TemporaryFolder folder;
  Net net = on_meta([] { return Net(); });
  shard_model(net, offloaded(strategies()[0], folder));
  materialize(*net, [](torch::nn::Module& module) {
    for (auto& parameter : module.parameters(/*recurse=*/false)) parameter.fill_(0.5);
  });
  for (const auto& parameter : net->parameters()) EXPECT_TRUE(region_of(parameter));
  EXPECT_TENSORS_EQUAL(full(net->embed->weight), torch::full({61, 18}, 0.5));
}

/// What all ranks are told, which is the same.
std::string error_of_all(const std::function<void()>& run) {
  auto text = error_of(run);
  EXPECT_FALSE(text.empty()) << "rank " << world_rank() << " was told nothing";
  return text;
}

TEST(Offload, SaysWhyThereIsNoFile) {
  const TemporaryFolder folder;
  torch::nn::Linear linear(8, 8);
  const auto shard = [&](const std::string& where) {
    FullyShardOptions options{.initial_weights = InitialWeights::kBroadcast};
    options.offload = offload_to_files(where);
    fully_shard(linear, world_mesh(), options);
  };
  const auto last = world_size() - 1;
  const auto absent = folder.file("absent");
  const auto text = error_of_all([&] { shard(world_rank() == last ? absent : folder.path().string()); });
  EXPECT_THAT(text,
              ::testing::HasSubstr(c10::str("offload: cannot make a file in the folder ", world_rank() == last ? absent : "")));
  EXPECT_THAT(text, ::testing::HasSubstr(c10::str("on rank ", last, ": No such file or directory")));
  EXPECT_THAT(error_of_all([&] { shard(""); }), ::testing::HasSubstr("the folder for files has an empty name, on rank 0"));
  EXPECT_THAT(error_of_all([&] { shard(folder.write("file", "")); }), ::testing::HasSubstr("Not a directory"));
  if (world_size() > 1) {
    FullyShardOptions options;
    if (world_rank() == 0) options.offload = offload_to_files(folder.path());
    EXPECT_THAT(error_of_all([&] { fully_shard(linear, world_mesh(), options); }), ::testing::HasSubstr("offload"));
  }
  EXPECT_FALSE(is_sharded(*linear)) << "an error leaves the module as it was";
}

TEST(Offload, SaysThatAFolderIsReadOnly) {
  const SharedFolder shared;
  const auto folder = shared.path() / "read-only";
  std::optional<SmallDisk> disk;
  if (!make_disk(disk, folder, "size=1m", MS_RDONLY)) GTEST_SKIP() << "this process may not mount";
  Net net = make_net();
  auto strategy = strategies()[0];
  strategy.options.offload = offload_to_files(folder);
  EXPECT_THAT(
      error_of_all([&] { shard_model(net, strategy); }),
      ::testing::HasSubstr(c10::str("cannot make a file in the folder ", folder.string(), " on rank 0: Read-only file system")));
  SharedFolder::barrier();
}

TEST(Offload, SaysThatADiskIsFull) {
  const SharedFolder shared;
  const auto folder = shared.path() / "small";
  std::optional<SmallDisk> disk;
  if (!make_disk(disk, folder, "size=256k", 0)) GTEST_SKIP() << "this process may not mount";
  const TemporaryFolder large;
  // Rank 0 alone has no room: for the shards, or for what the first step adds to them.
  const auto shard = [&](int64_t width) {
    torch::nn::Linear linear(width, width);
    FullyShardOptions options{.initial_weights = InitialWeights::kBroadcast};
    options.offload = offload_to_files(world_rank() == 0 ? folder : large.path());
    fully_shard(linear, world_mesh(), options);
    return linear;
  };
  EXPECT_THAT(error_of_all([&] { shard(1024); }),
              ::testing::MatchesRegex(c10::str("offload: cannot reserve [0-9]+ bytes in the folder ", folder.string(),
                                               " on rank 0: No space left on device")));
  const auto elements = static_cast<double>(100 * 1024 * world_size()) / sizeof(float);
  auto linear = shard(static_cast<int64_t>(std::sqrt(elements)));
  torch::optim::AdamW optimizer(linear->parameters());
  linear->forward(torch::ones({1, linear->weight.size(1)}, test_device())).sum().backward();
  EXPECT_THAT(error_of_all([&] { step(optimizer); }),
              ::testing::HasSubstr(c10::str("in the folder ", folder.string(), " on rank 0: No space left on device")));
  SharedFolder::barrier();
}

TEST(Offload, TrainsOnWhenItsFolderVanishes) {
  auto folder = std::make_optional<TemporaryFolder>();
  auto plain = make_training(strategies()[0], makers()[1]),
       files = make_training(offloaded(strategies()[0], *folder), makers()[1]);
  expect_same(train(files, 0, 1), train(plain, 0, 1));
  for (auto* each : {&files, &plain}) loss_on_device(each->net, own_batch_on_device(1)).backward();
  folder.reset();
  for (auto* each : {&files, &plain}) step(*each->optimizer);
  expect_same(train(files, 2, 4), train(plain, 2, 4));
  expect_same(files.net, plain.net);
}

TEST(Offload, TellsEveryRankOfAnErrorOfTheDisk) {
  const TemporaryFolder folder;
  auto training = make_training(offloaded(strategies()[0], folder), makers()[1]);
  train(training, 0, 1);
  loss_on_device(training.net, own_batch_on_device(1)).backward();
  {
    std::optional<FileSizeLimit> limit;
    if (world_rank() == 0) limit.emplace(4096);
    const auto text = error_of_all([&] { step(*training.optimizer); });
    EXPECT_THAT(text, ::testing::HasSubstr("offload: cannot write "));
    EXPECT_THAT(text, ::testing::HasSubstr("on rank 0: File too large"));
  }
  for (const auto& parameter : training.net->parameters()) {
    EXPECT_TRUE(region_of(parameter)) << "its memory is that of its file again";
    EXPECT_TRUE(parameter.grad().defined());
  }
  train(training, 2, 3); // all ranks are in step
}

/// Takes away what is in the files of `folder` on this rank, as a broken disk does.
void cut_files(const TemporaryFolder& folder) {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code absent;
    const auto target = std::filesystem::read_symlink(entry.path(), absent).string();
    if (target.starts_with(folder.path().string())) (void)::ftruncate(std::stoi(entry.path().filename()), 0);
  }
}

TEST(Offload, TellsEveryRankOfAGradientThatCannotBeWritten) {
  const TemporaryFolder folder;
  auto training = make_training(offloaded(strategies()[0], folder), makers()[1]);
  train(training, 0, 1);
  training.optimizer->zero_grad();
  {
    std::optional<FileSizeLimit> limit;
    if (world_rank() == 0) limit.emplace(4096);
    loss_on_device(training.net, own_batch_on_device(1)).backward();
  }
  const auto text = error_of_all([&] { step(*training.optimizer); });
  EXPECT_THAT(text, ::testing::HasSubstr("offload: cannot write "));
  EXPECT_THAT(text, ::testing::HasSubstr("on rank 0: File too large"));
  for (const auto& parameter : training.net->parameters())
    EXPECT_TRUE(DTensor(parameter.grad()).local().is_cpu()) << "as on the other ranks";
  train(training, 2, 3);
}

/// No more than `more` bytes of address space for this process while it lives.
class AddressSpaceLimit {
 public:
  explicit AddressSpaceLimit(int64_t more) {
    ::getrlimit(RLIMIT_AS, &before_);
    int64_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    const rlimit limit{static_cast<rlim_t>(pages * ::sysconf(_SC_PAGESIZE) + more), before_.rlim_max};
    ::setrlimit(RLIMIT_AS, &limit);
  }
  AddressSpaceLimit(const AddressSpaceLimit&) = delete;
  AddressSpaceLimit& operator=(const AddressSpaceLimit&) = delete;
  ~AddressSpaceLimit() { ::setrlimit(RLIMIT_AS, &before_); }

 private:
  rlimit before_{};
};

TEST(Offload, ReadsAgainAfterAReadThatCouldNotBegin) {
  if (test_device_type() != sim::kDeviceType || world_size() > 1 || kIsSanitized)
    GTEST_SKIP() << "needs one rank's buffers between a file and a device, and a limit of address space";
  constexpr int64_t kWidth = 3000;
  const TemporaryFolder folder;
  torch::nn::Linear linear(kWidth, kWidth);
  auto handle = fully_shard(linear, world_mesh(), {.offload = offload_to_files(folder.path(), /*pin_memory=*/false)});
  const torch::NoGradGuard no_grad;
  const auto x = torch::ones({1, kWidth}, test_device());
  const auto expected = linear(x).cpu();
  for (int i = 0; i < 2; ++i) { // whose blocks the device keeps
    handle.reshard();
    if (i == 0) linear(x);
  }
  sim::synchronize();
  {
    const AddressSpaceLimit limit(int64_t{8} << 20);
    EXPECT_THROWS_WITH(linear(x), "offload: no memory for a buffer of 36");
  }
  EXPECT_TENSORS_EQUAL(linear(x).cpu(), expected);
}

TEST(Offload, AnErrorOfTheDeviceIsOneOfTheBackward) {
  if (test_device_type() != sim::kDeviceType) GTEST_SKIP() << "needs a device that goes on after its errors";
  const TemporaryFolder folder;
  for (const bool pins : {true, false}) {
    auto strategy = strategies()[0];
    strategy.options.offload = offload_to_files(folder.path(), pins);
    auto training = make_training(strategy, makers()[1]);
    const auto loss = loss_on_device(training.net, own_batch_on_device(0));
    const auto text = error_of([&] { // the latest
      const auto wrong = torch::ones({3}, test_device()).index({torch::tensor({7}).to(test_device())});
      (loss + wrong.sum() * 0).backward();
    });
    EXPECT_THAT(text, ::testing::HasSubstr("index 7 is out of bounds"));
  }
}

TEST(Offload, RefusesAnOptimizerOfAllParametersTogether) {
  const TemporaryFolder folder;
  Net net = make_net();
  shard_model(net, offloaded(strategies()[0], folder));
  torch::optim::LBFGS optimizer(net->parameters());
  EXPECT_THROWS_WITH(step(optimizer), "step: LBFGS computes with all parameters together");
}

// The last one: it ends the groups of ranks.
TEST(Offload, TellsEveryRankOfAShardThatCannotBeRead) {
  const TemporaryFolder folder;
  auto training = make_training(offloaded(strategies()[0], folder), makers()[1]);
  train(training, 0, 1);
  if (world_rank() == 0) cut_files(folder);
  // A device's error is found where the host waits for the device.
  const auto text = error_of_all([&] { loss_on_device(training.net, own_batch_on_device(1)).item<float>(); });
  EXPECT_THAT(text, ::testing::HasSubstr("Input/output error"));
  EXPECT_THAT(text, ::testing::HasSubstr("offload: cannot read "));
  EXPECT_THAT(text, ::testing::HasSubstr("rank 0"));
  if (test_device_type() == sim::kDeviceType) error_of([] { sim::synchronize(); }); // the gather that ended so
}

} // namespace
} // namespace tessera::testing::offload_test
