#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tessera/fsdp/fully_shard.h>
#include <tessera/nn/average_buffers.h>

#include <tessera/tests/support/line_mesh.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/test_device.h>
#include <tessera/tests/support/world.h>

namespace tessera::testing::average_buffers_test {
namespace {

namespace nn = torch::nn;
using torch::Tensor;

struct Holder : nn::Module {
  Tensor add(const std::string& name, const Tensor& tensor) {
    return register_buffer(name, tensor.defined() ? tensor.to(test_device()) : tensor);
  }
};

TEST(AverageBuffers, GivesAllRanksTheMeanAndOfIntegersTheFirstRanks) {
  const auto rank = static_cast<double>(world_rank()), middle = static_cast<double>(world_size() - 1) / 2;
  Holder holder;
  const auto floats = holder.add("floats", torch::full({2, 3}, rank)),
             halves = holder.add("halves", torch::full({5}, rank, torch::kBFloat16));
  const auto complex =
      holder.add("complex", torch::full({2}, c10::complex<float>(static_cast<float>(rank), 1), torch::kComplexFloat));
  const auto base = torch::full({4, 2}, rank, torch::kDouble).to(test_device());
  const auto strided = holder.add("strided", base.t()), scalar = holder.add("scalar", torch::tensor(rank));
  const auto count = holder.add("count", torch::tensor(world_rank() + 7)),
             mask = holder.add("mask", torch::full({2}, world_rank() == 0));
  holder.add("nothing", Tensor());
  holder.add("empty", torch::empty({0}));
  const auto large = holder.add("large", torch::full({(1 << 22) + 5}, rank)); // a message of its own
  average_buffers(holder, line_mesh());
  EXPECT_TENSORS_EQUAL(floats, torch::full({2, 3}, middle));
  EXPECT_TENSORS_EQUAL(halves, torch::full({5}, middle, torch::kBFloat16));
  EXPECT_TENSORS_EQUAL(torch::view_as_real(complex).select(1, 0), torch::full({2}, middle));
  EXPECT_TENSORS_EQUAL(base, torch::full({4, 2}, middle, torch::kDouble));
  EXPECT_TENSORS_EQUAL(scalar, torch::tensor(middle));
  EXPECT_TENSORS_EQUAL(large, torch::full({(1 << 22) + 5}, middle));
  EXPECT_EQ(count.item<int64_t>(), 7);
  EXPECT_TRUE(mask.all().item<bool>());
  EXPECT_TRUE(strided.is_alias_of(base));
}

TEST(AverageBuffers, OfAShardedModelOverAMeshOfTwoDims) {
  const int64_t replicas = world_size() % 2 == 0 ? 2 : 1;
  const auto mesh = init_device_mesh(test_device_type(), {replicas, world_size() / replicas});
  torch::manual_seed(0);
  nn::Sequential net(nn::Linear(3, 4), nn::BatchNorm1d(4));
  fully_shard(net, mesh);
  torch::manual_seed(world_rank());
  const auto x = torch::randn({6, 3}).to(test_device());
  net->forward(x);
  auto mean = net->named_buffers()["1.running_mean"].clone();
  line_mesh().communicator()->all_reduce(mean, ReduceOp::kAvg, "mean").wait();
  average_buffers(*net, mesh);
  EXPECT_TENSORS_CLOSE(net->named_buffers()["1.running_mean"], mean, 1e-6, 1e-7);
  EXPECT_EQ(net->named_buffers()["1.num_batches_tracked"].item<int64_t>(), 1);
  Holder none;
  average_buffers(none, mesh);
}

TEST(BroadcastBuffers, GivesAllRanksTheFirstRanksValues) {
  Holder holder;
  const auto mine = static_cast<float>(world_rank());
  const auto mean = holder.add("mean", torch::full({3}, mine)),
             count = holder.add("count", torch::full({}, world_rank(), torch::kLong)),
             strided = holder.add("strided", torch::full({4, 2}, mine).t());
  broadcast_buffers(holder, line_mesh());
  EXPECT_TENSORS_EQUAL(mean, torch::zeros({3}));
  EXPECT_TENSORS_EQUAL(strided, torch::zeros({2, 4}));
  EXPECT_EQ(count.item<int64_t>(), 0);
  EXPECT_THROWS_WITH(broadcast_buffers(holder, DeviceMesh()), "broadcast_buffers: the mesh is undefined");
}

TEST(AverageBuffers, SaysWhatIsWrong) {
  Holder holder;
  holder.add("same", torch::ones({2}));
  EXPECT_THROWS_WITH(average_buffers(holder, DeviceMesh()), "average_buffers: the mesh is undefined");
  Holder on_meta;
  on_meta.register_buffer("mean", torch::empty({2}, torch::kMeta));
  EXPECT_THROWS_WITH(average_buffers(on_meta, line_mesh()), "the buffer mean is on the meta device");
  if (world_size() == 1) return;
  const bool last = world_rank() == last_rank();
  holder.add(last ? "other" : "mean", torch::ones({2}));
  EXPECT_THROWS_WITH(average_buffers(holder, line_mesh()),
                     c10::str("average_buffers: the ranks' buffers differ: rank 0 has mean Float[2], "
                              "rank ",
                              last_rank(), " has other Float[2]"));
  Holder fewer;
  if (!last) fewer.add("mean", torch::ones({2}));
  EXPECT_THROWS_WITH(average_buffers(fewer, line_mesh()), "has no further buffer");
  EXPECT_THROWS_WITH(average_buffers(holder, make_device_mesh(torch::kCPU, {1}, {world_rank() == 0 ? 1 : 0})),
                     "this rank is outside the mesh");
}

} // namespace
} // namespace tessera::testing::average_buffers_test
