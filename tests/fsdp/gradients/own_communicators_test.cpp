// Gathers and reductions over communicators of the program's own.
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <utility>

#include <tessera/collectives/process_context.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/fsdp/model/sharded_module.h>

#include <tessera/tests/fsdp/twin.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing::own_communicators_test {
namespace {

/// Counts what it passes on.
class Counting final : public Communicator {
 public:
  explicit Counting(CommunicatorPtr inner)
      : Communicator("counting", inner->ranks(), inner->rank(), inner->device_type()), inner_(std::move(inner)) {}
  Work all_gather_into(const at::Tensor& output, const at::Tensor& input, std::string_view label) override {
    ++gathers;
    before_gather();
    return inner_->all_gather_into(output, input, label);
  }
  Work reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op, std::string_view label) override {
    ++reductions;
    return inner_->reduce_scatter(output, input, op, label);
  }
  Work all_reduce(const at::Tensor& tensor, ReduceOp op, std::string_view label) override {
    return inner_->all_reduce(tensor, op, label);
  }
  Work all_to_all(const at::Tensor& output, const at::Tensor& input, const std::vector<int64_t>& output_splits,
                  const std::vector<int64_t>& input_splits, std::string_view label) override {
    return inner_->all_to_all(output, input, output_splits, input_splits, label);
  }
  Work broadcast(const at::Tensor& tensor, int root, std::string_view label) override {
    return inner_->broadcast(tensor, root, label);
  }
  Work coalesced(const std::function<void()>& issue) override { return inner_->coalesced(issue); }
  void barrier(std::string_view label) override { inner_->barrier(label); }

  int gathers = 0, reductions = 0;
  std::function<void()> before_gather = [] {};

 private:
  CommunicatorPtr inner_;
};

/// Communicators of the test's own, one for the gathers of all groups and one for their reductions.
struct Communicators {
  explicit Communicators(const DeviceMesh& mesh)
      : gather(std::make_shared<Counting>(mesh.communicator(mesh.ndim() - 1, "own gathers"))),
        reduce(std::make_shared<Counting>(mesh.communicator(mesh.ndim() - 1, "own reductions"))) {}
  void serve(FSDPModule handle) const {
    handle.set_custom_all_gather(gather);
    handle.set_custom_reduce_scatter(reduce);
  }
  /// All collectives of the parameters and gradients on the shard dim were theirs; `also_others` has more of them.
  void expect_all(bool also_others) const {
    const auto gathers = process_context().count(CollectiveKind::kAllGather).calls;
    const auto reductions = process_context().count(CollectiveKind::kReduceScatter).calls;
    EXPECT_EQ(gather->reductions + reduce->gathers, 0);
    EXPECT_GT(gather->gathers, 0);
    EXPECT_GT(reduce->reductions, 0);
    if (also_others) return;
    EXPECT_EQ(gather->gathers, gathers);
    EXPECT_EQ(reduce->reductions, reductions);
  }
  std::shared_ptr<Counting> gather, reduce;
};

/// Two steps of two backwards, with a write in between.
TEST(OwnCommunicators, CarryTheGroups) {
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    Twin models(strategy);
    auto root = fsdp(*models.sharded);
    const auto mesh = strategy.mesh();
    const Communicators own(mesh);
    if (strategy.replicates || mesh.size(mesh.ndim() - 1) == 1) {
      EXPECT_THROWS_WITH(own.serve(root), "has no such collective, on one rank or by its strategy");
      continue;
    }
    own.serve(root);
    for (const auto& block : *models.sharded->blocks) own.serve(fsdp(*block));
    process_context().reset_counters();
    for (int64_t step = 0; step < 2; ++step) {
      for (auto net : {models.plain, models.sharded}) {
        const torch::NoGradGuard no_grad;
        net->zero_grad();
        for (auto& parameter : net->parameters()) parameter.mul_(0.9);
      }
      for (const bool is_last : {false, true}) {
        root.set_is_last_backward(is_last);
        models.backward(2 * step + static_cast<int64_t>(is_last));
      }
      const auto& option = strategy.options.reshard_after_forward;
      if (step == 0) own.expect_all((option && option->ranks()) || strategy.name.starts_with("hierarchical"));
      models.expect_equal_gradients();
    }
  }
}

TEST(OwnCommunicators, OfOtherRanksAreAnError) {
  if (world_size() == 1) GTEST_SKIP() << "one rank communicates with nobody";
  Twin models(strategies()[0]);
  auto root = fsdp(*models.sharded);
  EXPECT_THROWS_WITH(root.set_custom_all_gather(nullptr), "set_custom_all_gather: the communicator is null");
  EXPECT_THROWS_WITH(root.set_custom_reduce_scatter(nullptr), "set_custom_reduce_scatter: the communicator is null");
  const auto alone = make_device_mesh(torch::kCPU, {1}, {world_rank()}).communicator();
  EXPECT_THROWS_WITH(root.set_custom_all_gather(alone), "but the shard dim of");
  EXPECT_THROWS_WITH(root.set_custom_reduce_scatter(alone), "but the shard dim of");
  models.backward(0);
  models.expect_equal_gradients();
}

/// It runs amid the work of the model, whose lock its thread has.
TEST(OwnCommunicators, ThatUseTheirModelAreAnError) {
  if (world_size() == 1) GTEST_SKIP() << "one rank communicates with nobody";
  Twin models(strategies()[0]);
  auto root = fsdp(*models.sharded);
  const Communicators own(root.mesh());
  own.serve(root);
  own.gather->before_gather = [&] { root.set_prefetch_depth(1); };
  EXPECT_THROWS_WITH(root.unshard(), "hooks and extensions may use it, but not what else runs while it computes");
  own.gather->before_gather = [] {};
  models.backward(0);
  models.expect_equal_gradients();
}

/// A gather that the program has not asked for may be under way between a forward and its backward.
TEST(OwnCommunicators, AreReplacedWhileTheyGather) {
  for (const auto& strategy : strategies()) {
    Twin models(strategy);
    auto root = fsdp(*models.sharded);
    const auto group = root.state()->group();
    if (!group->stages().inner_gather().communicator) continue;
    SCOPED_TRACE(strategy.name);
    const auto counting = std::make_shared<Counting>(
        process_context().communicator(RankList(group->stages().inner_gather().communicator->ranks()),
                                       group->stages().inner_gather().communicator->device_type(), "own"));
    auto handle = root.unshard_async();
    root.set_custom_all_gather(counting);
    handle.wait();
    EXPECT_EQ(counting->gathers, 0);
    models.backward(0);
    models.expect_equal_gradients();
    root.reshard();
    root.unshard();
    EXPECT_GE(counting->gathers, 1);
  }
}

} // namespace
} // namespace tessera::testing::own_communicators_test
