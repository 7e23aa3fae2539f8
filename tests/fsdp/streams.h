#pragma once

// What the tests of fully_shard's streams share: the simulated device, and memory that is written as soon as it is free.

#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include <tessera/fsdp/buffers/side_stream.h>
#include <tessera/fsdp/model/sharded_module.h>
#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/support/simulated_device/simulated_device.h>

namespace tessera::testing {

class Streams : public ::testing::Test {
 protected:
  void SetUp() override {
    sim::enable();
    sim::configure({});
    mesh_device_type = sim::kDeviceType;
    sim::reset_races();
  }
  void TearDown() override {
    mesh_device_type = test_device_type();
    sim::synchronize();
    sim::configure({});
    sim::reset_races();
  }
  static void expect_no_races() {
    sim::synchronize();
    for (const auto& [race, times] : sim::races()) ADD_FAILURE() << times << " times: " << race;
    sim::reset_races();
  }
  /// Runs `test` on a new model in each layout and strategy, and asks for no races in it.
  template <typename Test> // void(Net&)
  static void for_each_strategy(const Test& test) {
    for (const auto& strategy : strategies()) {
      SCOPED_TRACE(strategy.name);
      Net net = make_net();
      shard_model(net, strategy);
      test(net);
      expect_no_races();
    }
  }
};

inline torch::Tensor batch_of(int64_t step, c10::Device device) {
  const auto batch = global_batch(step);
  return (device.is_cpu() ? batch : part_of(batch, world_rank(), world_size())).to(device);
}

inline std::vector<double> values(const std::vector<torch::Tensor>& losses) {
  std::vector<double> values;
  for (const auto& loss : losses) values.push_back(loss.item<double>());
  return values;
}

/// Writes the memory that groups of this size have just given back, as whoever is next given it would.
inline void write_memory_of(int64_t bytes) {
  constexpr int kGroups = 8;
  std::vector<torch::Tensor> given;
  for (const int64_t more : {0, 256, 512})
    for (int i = 0; i < kGroups; ++i)
      given.push_back(torch::empty({bytes + more}, torch::dtype(torch::kByte).device(sim::kDevice)).zero_());
}

inline int64_t unsharded_bytes(torch::nn::Module& module) { return fsdp(module).state()->group()->layout().unsharded_bytes; }

/// Of the inputs and outputs of reductions.
inline std::vector<int64_t> bytes_of_reductions(Net& net) {
  std::vector<int64_t> all;
  for (const auto& group : fsdp(*net).state()->subtree_groups()) {
    const auto layout = internal::plan_reduce(group->layout(), std::vector<bool>(group->parameters().size(), true));
    const auto bytes = layout.chunk_numel * static_cast<int64_t>(sizeof(float));
    all.push_back(group->roles().shard_ranks() * bytes);
    for (const auto& stage : group->stages().reductions)
      all.push_back(stage.kind == internal::Stage::Kind::kReduceScatter ? all.back() / stage.ranks() : all.back());
  }
  return all;
}

/// The same of what reductions have given back.
inline void write_memory_of_reductions(Net& net) {
  for (const auto bytes : bytes_of_reductions(net)) write_memory_of(bytes);
}

/// Runs what a program does on several streams in one order.
class InOneOrder {
 public:
  template <typename Program>
  void on(const c10::Stream& stream, const Program& program) {
    const auto before = internal::mark(last_);
    const c10::StreamGuard guard(stream);
    Work(before).wait();
    program();
    last_ = stream;
  }

 private:
  c10::Stream last_ = sim::stream();
};

} // namespace tessera::testing
