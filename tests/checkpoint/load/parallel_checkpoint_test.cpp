// Checkpoints of models that are tensor-parallel and sharded besides, between meshes of other shapes.
#include <gtest/gtest.h>
#include <tessera/checkpoint/checkpoint.h>
#include <torch/torch.h>

#include <tessera/tests/checkpoint/shared_folder.h>
#include <tessera/tests/fsdp/parallel_mlp.h>
#include <tessera/tests/support/sweep.h>

namespace tessera::testing::parallel_checkpoint_test {
namespace {

struct Trained {
  Trained(const ParallelMesh& mesh, BufferLayout layout, int64_t hidden, uint64_t seed) : net(hidden, seed) {
    shard_parallel(net, mesh, {.layout = layout});
    optimizer = std::make_unique<torch::optim::AdamW>(net->parameters(), torch::optim::AdamWOptions(0.01));
    torch::manual_seed(seed);
    const auto rows = torch::randn({12, 6}).chunk(mesh.data_ranks())[mesh.data_rank()].to(mesh.all.device());
    for (int64_t step = 0; step < 2; ++step) {
      optimizer->zero_grad();
      net->forward(rows).square().mean().backward();
      optimizer->step();
    }
  }
  StateDict state() { return state_dict(*net, *optimizer); }
  ParallelNet net;
  std::unique_ptr<torch::optim::AdamW> optimizer;
};

TEST(ParallelCheckpoint, LoadsBitIdenticalOnEveryOtherMesh) {
  using enum tessera::BufferLayout;
  for (const auto& [hidden, layout] :
       std::vector<std::pair<int64_t, BufferLayout>>{{10, kRagged}, {5, kRagged}, {7, kPerParameter}, {1, kRagged}}) {
    for (const auto& saved_shape : sweep(parallel_shapes(), 2)) {
      const ParallelMesh saved_mesh(saved_shape);
      Trained saved(saved_mesh, layout, hidden, 1);
      const SharedFolder folder;
      checkpoint::save(saved.state(), folder.path() / "c");
      const auto expected = state_dict(*saved.net, *saved.optimizer, {.full_state_dict = true});
      for (const auto& shape : sweep(parallel_shapes(), 3)) {
        const ParallelMesh mesh(shape);
        SCOPED_TRACE(c10::str("from ", saved_mesh.all.to_string(), " to ", mesh.all.to_string(), ", hidden ", hidden));
        Trained loaded(mesh, layout == kRagged ? kPerParameter : kRagged, hidden, 2);
        checkpoint::load(loaded.state(), folder.path() / "c");
        const auto got = state_dict(*loaded.net, *loaded.optimizer, {.full_state_dict = true});
        ASSERT_EQ(got.size(), expected.size());
        for (const auto& entry : expected.entries()) {
          if (entry.is_tensor()) EXPECT_TRUE(torch::equal(got.tensor(entry.name), expected.tensor(entry.name))) << entry.name;
        }
      }
      ParallelNet plain(hidden, 3);
      checkpoint::load(state_dict(*plain), folder.path() / "c", {.allow_unused = true});
      for (const auto& parameter : plain->named_parameters())
        EXPECT_TRUE(torch::equal(parameter.value().detach(), expected.tensor(parameter.key()).cpu())) << parameter.key();
    }
  }
}

} // namespace
} // namespace tessera::testing::parallel_checkpoint_test
