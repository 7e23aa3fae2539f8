// What makes an at::Tensor a DTensor: its key, its meta, the memory that it shares, its errors.
#include <c10/core/AutogradState.h>
#include <gtest/gtest.h>

#include <thread>

#include <tessera/dtensor/debug.h>
#include <tessera/dtensor/tensor/program_scopes.h>
#include <tessera/dtensor/tensor/view_replay.h>

#include <tessera/tests/dtensor/layouts.h>

namespace tessera::testing::dtensor_impl_test {
namespace {

using at::Tensor;
using internal::alias_dtensor, internal::become_dtensor, internal::dtensor_meta, internal::make_dtensor;
using internal::DTensorMeta, internal::KeepViewReplay, internal::ProgramScopes;
using internal::end_view_replay, internal::start_view_replay, internal::open_scope, internal::program_scopes;
using internal::shares_memory, internal::strides_like;

SpecPtr spec_of(std::vector<int64_t> sizes, const Placement& placement, at::ScalarType dtype = at::kFloat) {
  return Spec::intern(line_mesh(), {placement}, std::move(sizes), dtype);
}

Tensor ones(std::vector<int64_t> sizes, const Placement& placement) {
  const auto spec = spec_of(std::move(sizes), placement);
  return make_dtensor(torch::ones(spec->local_sizes(), test_device()), spec);
}

TEST(DTensorImpl, HasTheGlobalShapeAndNoStorage) {
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{5, 3}, {0, 3}, {1}}) {
    const auto tensor = ones(sizes, Shard{0});
    EXPECT_EQ(tensor.sizes(), c10::IntArrayRef(sizes));
    EXPECT_EQ(tensor.strides(), c10::IntArrayRef(contiguous_strides(sizes)));
    ASSERT_NE(dtensor_meta(tensor), nullptr);
    EXPECT_EQ(dtensor_meta(tensor)->local.sizes(), c10::IntArrayRef(dtensor_meta(tensor)->spec->local_sizes()));
    EXPECT_THROWS_WITH(tensor.storage(), "a DTensor has no storage of its own");
    EXPECT_THROWS_WITH(tensor.data_ptr<float>(), "to_local()");
  }
  EXPECT_EQ(dtensor_meta(torch::ones({2})), nullptr);
  EXPECT_EQ(dtensor_meta(Tensor()), nullptr);
}

TEST(DTensorImpl, RefusesAPartThatDoesNotFit) {
  const auto spec = spec_of({4, 3}, Replicate{});
  EXPECT_THROWS_WITH(make_dtensor(torch::ones({3, 3}), spec), "the local tensor has shape [3, 3], but this rank's part of");
  EXPECT_THROWS_WITH(make_dtensor(torch::ones({4, 3}, torch::kDouble), spec), "the local tensor has dtype Double");
}

TEST(DTensorImpl, AliasesAndDetachedOnesShareTheMeta) {
  const auto tensor = ones({4, 2}, Shard{0});
  EXPECT_EQ(dtensor_meta(alias_dtensor(tensor)), dtensor_meta(tensor));
  EXPECT_EQ(dtensor_meta(tensor.detach()), dtensor_meta(tensor));
  const auto version = tensor._version();
  alias_dtensor(tensor).add_(1);
  EXPECT_GT(tensor._version(), version);
  EXPECT_TENSORS_EQUAL(whole_of(tensor), torch::full({4, 2}, 2.0F, test_device()));
}

TEST(DTensorImpl, TellsWhetherItsMemoryIsShared) {
  const auto tensor = ones({4, 2}, Shard{0});
  EXPECT_FALSE(shares_memory(*dtensor_meta(tensor)));
  const auto view = tensor.view({8});
  EXPECT_TRUE(shares_memory(*dtensor_meta(tensor)));
}

TEST(DTensorImpl, ABecomingTensorKeepsItsHandle) {
  auto weight = torch::ones({4, 2}, torch::requires_grad());
  const auto handle = weight; // NOLINT(performance-unnecessary-copy-initialization): another handle
  const auto spec = spec_of({4, 2}, Shard{0});
  become_dtensor(weight, c10::make_intrusive<DTensorMeta>(torch::zeros(spec->local_sizes(), test_device()), spec));
  EXPECT_TRUE(is_dtensor(handle) && handle.requires_grad() && handle.is_leaf());
  EXPECT_TENSORS_EQUAL(whole_of(handle.detach()), torch::zeros({4, 2}, test_device()));
  EXPECT_THROWS_WITH(handle.data_ptr<float>(), "a DTensor has no storage of its own");
  const c10::InferenceMode mode;
  EXPECT_THROWS_WITH(become_dtensor(torch::ones({4, 2}),
                                    c10::make_intrusive<DTensorMeta>(torch::zeros(spec->local_sizes(), test_device()), spec)),
                     "InferenceMode");
}

TEST(StridesLike, FollowsTheOrderOfDimsInMemory) {
  EXPECT_EQ(strides_like(torch::ones({2, 3}), {4, 3}), std::vector<int64_t>());                       // contiguous
  EXPECT_EQ(strides_like(torch::ones({3, 2}).t(), {4, 3}), (std::vector<int64_t>{1, 4}));             // columns
  EXPECT_EQ(strides_like(torch::ones({2, 8}).narrow(1, 0, 3), {4, 3}), (std::vector<int64_t>{3, 1})); // without the gaps
  EXPECT_EQ(strides_like(torch::ones({3, 1}).expand({3, 2}), {6, 2}), std::vector<int64_t>());        // overlaps
  EXPECT_EQ(strides_like(torch::ones({6}), {2, 3}), std::vector<int64_t>());                          // merged dims
  EXPECT_EQ(strides_like(torch::ones({1, 2, 2, 2}).contiguous(at::MemoryFormat::ChannelsLast), {2, 2, 2, 2}),
            (std::vector<int64_t>{8, 1, 4, 2}));
}

TEST(ProgramScopes, HoldInTheThreadThatOpensThem) {
  EXPECT_FALSE(program_scopes().strict_sharding);
  {
    const auto outer = open_scope([](ProgramScopes& scopes) { scopes.strict_sharding = true; });
    const auto inner = open_scope([](ProgramScopes& scopes) { scopes.implicit_replication = true; });
    EXPECT_TRUE(program_scopes().strict_sharding && program_scopes().implicit_replication);
    bool in_another = true;
    std::thread([&] { in_another = program_scopes().strict_sharding; }).join();
    EXPECT_FALSE(in_another);
  }
  EXPECT_FALSE(program_scopes().strict_sharding || program_scopes().implicit_replication);
}

TEST(ViewReplay, IsTurnedOnByTheFirstDTensor) {
  const KeepViewReplay keep;
  auto& state = c10::AutogradState::get_tls_state();
  end_view_replay();
  ASSERT_FALSE(state.get_view_replay_enabled());
  {
    const KeepViewReplay within;
    ones({2}, Replicate{});
    EXPECT_TRUE(state.get_view_replay_enabled());
  }
  EXPECT_FALSE(state.get_view_replay_enabled());
  state.set_view_replay_enabled(true); // by the program: it stays on
  start_view_replay();
  end_view_replay();
  EXPECT_TRUE(state.get_view_replay_enabled());
  state.set_view_replay_enabled(false);
}

} // namespace
} // namespace tessera::testing::dtensor_impl_test
