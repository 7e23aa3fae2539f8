#include <tessera/collectives/run_ranks.h>
#include <tessera/dtensor/dispatch/fallback.h>
#include <tessera/dtensor/strict_sharding.h>

#include <sstream>
#include <thread>

#include <tessera/tests/support/autocast.h>

#include <tessera/tests/dtensor/layouts.h>

namespace tessera::testing::api_test {
namespace {

using at::Tensor;

Tensor values() { return torch::arange(15, torch::kFloat).view({5, 3}); }

std::string mesh_text() { return line_mesh().to_string(); }

TEST(Placement, PrintsComparesAndHashes) {
  EXPECT_EQ(to_string(Placements{Shard{1}, Replicate{}}), "(Shard(1), Replicate())");
  EXPECT_EQ(to_string(Placement(RaggedShard{0, {3, 0, 2}})), "RaggedShard(0, [3, 0, 2])");
  EXPECT_EQ(to_string(Placement(Partial{Partial::Op::kNorm, 3})), "Partial(norm 3)");
  EXPECT_EQ(to_string(Placement(Partial{Partial::Op::kAvg})), "Partial(avg)");
  EXPECT_NE(Placement(Shard{0}), Placement(Shard{1}));
  EXPECT_EQ(hash_value(RaggedShard{0, {1, 2}}), hash_value(RaggedShard{0, {1, 2}}));
  EXPECT_NE(hash_value(Shard{0}), hash_value(Replicate{}));
}

TEST(Spec, IsInternedAndDies) {
  const auto mesh = line_mesh(); // no other test has this shape: plans of operators keep the specs of their tensors
  uint64_t id = 0;
  {
    const auto a = Spec::intern(mesh, {Shard{-1}}, {41, 3}, at::kFloat);
    const auto b = Spec::intern(line_mesh(), {Shard{1}}, {41, 3}, at::kFloat, {3, 1});
    EXPECT_EQ(a, b);
    EXPECT_NE(a, Spec::intern(mesh, {Shard{0}}, {41, 3}, at::kFloat));
    EXPECT_NE(a, Spec::intern(mesh, {Shard{1}}, {41, 3}, at::kDouble));
    EXPECT_NE(a, Spec::intern(mesh, {Shard{1}}, {41, 3}, at::kFloat, {1, 41}));
    EXPECT_EQ(a->to_string(), "float[41, 3] (Shard(1)) on " + mesh_text());
    id = a->id();
  }
  EXPECT_NE(Spec::intern(mesh, {Shard{1}}, {41, 3}, at::kFloat)->id(), id);
}

TEST(Spec, ThreadsGetTheSame) {
  const auto mesh = line_mesh();
  std::vector<std::thread> threads;
  std::atomic<int> different{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 500; ++i) {
        const auto a = Spec::intern(mesh, {Shard{0}}, {i % 7, 3}, at::kFloat),
                   b = Spec::intern(mesh, {Shard{0}}, {i % 7, 3}, at::kFloat);
        if (a != b) ++different;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(different, 0);
}

TEST(Spec, RefusesWhatDoesNotFit) {
  const auto mesh = line_mesh();
  const auto n = mesh.size();
  const std::string suffix = " on a tensor of shape [5, 3] and " + mesh_text();
  const auto intern = [&](const Placements& placements) { Spec::intern(mesh, placements, {5, 3}, at::kFloat); };
  EXPECT_THROWS_WITH(intern({Shard{2}}), "Shard dim 2 is out of range: placements (Shard(2))" + suffix);
  EXPECT_THROWS_WITH(intern({Shard{0}, Shard{1}}),
                     "one placement a mesh dim is needed: placements (Shard(0), Shard(1))" + suffix);
  EXPECT_THROWS_WITH(intern({RaggedShard{0, std::vector<int64_t>(n, 7)}}),
                     "RaggedShard extents add up to " + std::to_string(7 * n) + ", not to 5: ");
  EXPECT_THROWS_WITH(intern({RaggedShard{0, {}}}), "RaggedShard needs one extent a rank of mesh dim 0: ");
  EXPECT_THROWS_WITH(intern({RaggedShard{2, std::vector<int64_t>(n, 1)}}), "RaggedShard dim 2 is out of range: ");
  EXPECT_THROWS_WITH(intern({StridedShard{0, std::numeric_limits<int64_t>::max()}}),
                     "the split factor of a StridedShard must be");
  EXPECT_THROWS_WITH(intern({Partial{Partial::Op::kNorm, -1}}), "the p of Partial(norm) must be positive and finite: ");
  EXPECT_THROWS_WITH(Spec::intern(mesh, {Shard{0}}, {-1, 3}, at::kFloat),
                     "sizes must not be negative: placements (Shard(0)) on a tensor of shape [-1, 3] and " + mesh_text());
  EXPECT_THROWS_WITH(Spec::intern(mesh, {Shard{0}}, {int64_t{1} << 40, int64_t{1} << 40}, at::kFloat),
                     "the tensor has more elements than 64 bits count: placements (Shard(0)) on a tensor of shape "
                     "[1099511627776, 1099511627776]");
  if (n != 4) return;
  const auto grid = init_device_mesh(test_device_type(), {2, 2});
  EXPECT_THROWS_WITH(Spec::intern(grid, {RaggedShard{0, {2, 3}}, Shard{0}}, {5, 3}, at::kFloat),
                     "tensor dim 0 is split by a RaggedShard and by a later mesh dim: ");
  EXPECT_THROWS_WITH(Spec::intern(grid, {Shard{0}, RaggedShard{0, {2, 3}}}, {5, 3}, at::kFloat),
                     "RaggedShard extents add up to 5, not to 3: ");
  EXPECT_THROWS_WITH(Spec::intern(grid, {Partial{}, Partial{Partial::Op::kMax}}, {5, 3}, at::kFloat),
                     "different Partial reductions do not mix: ");
}

TEST(Api, DistributeTensorSendsTheFirstRanksValues) {
  const auto mesh = line_mesh();
  const auto rank = static_cast<double>(process_context().rank());
  for (const auto& placement : whole_placements({5, 3}, mesh.size())) {
    const auto tensor = distribute_tensor(values() + 100 * rank, mesh, {placement});
    EXPECT_TENSORS_EQUAL(tensor.local(), lay_out(values(), mesh, {placement}));
  }
  EXPECT_TENSORS_EQUAL(distribute_tensor(values() + 100 * rank, mesh, {Partial{}}).full_tensor(), values());
  EXPECT_TRUE(distribute_tensor(values().requires_grad_(), mesh, {Shard{0}}).requires_grad());
  EXPECT_TRUE(distribute_tensor(values().requires_grad_(), mesh, {Shard{0}}).is_leaf());
  auto scalar = distribute_tensor(torch::tensor(2.0) + rank, mesh, {Replicate{}});
  EXPECT_EQ(scalar.item<double>(), 2.0);
  if (mesh.size() != 4) return;
  const auto grid = init_device_mesh(test_device_type(), {2, 2});
  for (const Placements& placements : std::vector<Placements>{{Shard{0}, Shard{0}},
                                                              {Shard{1}, Shard{0}},
                                                              {Replicate{}, Shard{0}},
                                                              {Shard{1}, Replicate{}},
                                                              {RaggedShard{0, {1, 4}}, Shard{1}},
                                                              {Shard{1}, RaggedShard{0, {5, 0}}}}) {
    EXPECT_TENSORS_EQUAL(distribute_tensor(values() + 100 * rank, grid, placements).local(), lay_out(values(), grid, placements));
  }
}

TEST(Api, DistributeTensorGivesPartsOfAMetaTensor) {
  const auto mesh = line_mesh();
  process_context().reset_counters();
  const auto tensor =
      distribute_tensor(torch::empty({5, 3}, torch::dtype(at::kDouble).device(at::kMeta).requires_grad(true)), mesh, {Shard{0}});
  EXPECT_EQ(process_context().count(CollectiveKind::kAllToAll).calls, 0);
  EXPECT_TRUE(tensor.is_meta());
  EXPECT_TRUE(tensor.requires_grad());
  EXPECT_EQ(tensor.sizes(), (std::vector<int64_t>{5, 3}));
  EXPECT_EQ(tensor.local().sizes(), c10::IntArrayRef(tensor.spec().local_sizes()));
  EXPECT_EQ(tensor.local().scalar_type(), at::kDouble);
}

TEST(Api, FromLocalAndToLocal) {
  const auto mesh = line_mesh();
  const auto n = mesh.size();
  auto local = torch::ones({2, 3}, mesh.device()).requires_grad_();
  const auto tensor = from_local(local, mesh, {Shard{-1}});
  EXPECT_EQ(tensor.sizes(), (std::vector<int64_t>{2, 3 * n}));
  EXPECT_EQ(tensor.placements(), Placements{Shard{1}});
  EXPECT_TRUE(tensor.local().is_alias_of(local));
  (to_local(tensor * 2) * 3).sum().backward();
  EXPECT_TENSORS_EQUAL(local.grad(), torch::full({2, 3}, 6.0F));
  const auto two = torch::ones({2}, mesh.device());
  EXPECT_EQ(from_local(two, mesh, {RaggedShard{0, std::vector<int64_t>(n, 2)}}).size(0), 2 * n);
  EXPECT_THROWS_WITH(from_local(two, mesh, {Shard{0}}, std::vector<int64_t>{2 * n + 100}),
                     "the local tensor has shape [2], but this rank's part of float[");
  EXPECT_THROWS_WITH(from_local(tensor, mesh, {Shard{0}}), "from_local: the tensor is a DTensor already");
  EXPECT_THROWS_WITH(DTensor(torch::ones({2})),
                     "DTensor: this tensor is not a DTensor; make one with distribute_tensor or from_local");
  EXPECT_THROWS_WITH(to_local(torch::ones({2})), "to_local: this tensor is not a DTensor");
}

/// As in a contrastive loss: each rank's rows against those of all ranks.
TEST(Api, FullTensorTakesThePlacementsOfItsGradient) {
  const auto mesh = line_mesh();
  auto whole = values().requires_grad_();
  whole.mm(whole.t()).square().sum().backward();
  auto rows = lay_out(values(), mesh, {Shard{0}}).requires_grad_();
  const auto all_rows = from_local(rows, mesh, {Shard{0}}, {{5, 3}}).full_tensor(Placements{Partial{}});
  rows.mm(all_rows.t()).square().sum().backward();
  EXPECT_TENSORS_CLOSE(rows.grad(), lay_out(whole.grad(), mesh, {Shard{0}}));
}

/// Hooks get, and may replace, the gradient, whenever they are added; it lies as the leaf does.
TEST(Api, HooksOfALeaf) {
  const auto mesh = line_mesh();
  const auto batch = torch::arange(12.).view({4, 3}), weight = torch::arange(6.).view({3, 2});
  auto plain = weight.clone().set_requires_grad(true);
  batch.mm(plain).square().sum().backward();
  for (const Placement& placement : {Placement(Replicate{}), Placement(Shard{0}), Placement(Shard{1})}) {
    for (const int added : {0, 1, 2}) { // before the first use, after it, before the second
      SCOPED_TRACE(::testing::Message() << placement << " " << added);
      auto leaf = make(weight, mesh, {placement});
      leaf.set_requires_grad(true);
      int calls = 0;
      const auto add = [&] {
        leaf.register_hook([&calls](const at::Tensor& gradient) { return ++calls, gradient * 2; });
        leaf.register_hook([&calls](const at::Tensor& gradient) { ++calls, gradient.sum(); });
      };
      for (int step = 0; step < 3; ++step) {
        if (step == 0 && added == 0) add();
        const auto loss = make(batch, mesh, {Shard{0}}).mm(leaf).square().sum();
        if (step == 0 && added == 1) add();
        loss.backward();
        if (step == 0 && added == 2) add();
        EXPECT_EQ(calls, 2 * (step + (added == 2 ? 0 : 1)));
      }
      EXPECT_EQ(DTensor(leaf.grad()).placements()[0], placement);
      EXPECT_TENSORS_CLOSE(DTensor(leaf.grad()).full_tensor(), plain.grad() * (added == 2 ? 5 : 6));
    }
  }
}

TEST(Api, TheGradientOfALeafLiesAsItsNewData) {
  const auto mesh = line_mesh();
  auto leaf = make(values(), mesh, {Shard{0}});
  leaf.set_requires_grad(true);
  for (const Placement& placement : {Placement(Shard{0}), Placement(Shard{1}), Placement(Replicate{})}) {
    leaf.set_data(make(values(), mesh, {placement}));
    leaf.mutable_grad().reset();
    (leaf * 2).sum().backward();
    EXPECT_EQ(DTensor(leaf.grad()).placements()[0], placement);
    EXPECT_TENSORS_EQUAL(DTensor(leaf.grad()).full_tensor(), torch::full({5, 3}, 2.0F));
  }
}

TEST(Api, PartsWithAPendingConjugateOrSignMoveAsTheirValues) {
  const auto mesh = line_mesh();
  torch::manual_seed(1); // the same values on every rank
  const auto whole = torch::randn({4 * mesh.size(), 3}, torch::kComplexDouble).to(mesh.device());
  const auto reals = [](const Tensor& t) { return t.is_complex() ? torch::view_as_real(t.resolve_conj().contiguous()) : t; };
  for (const auto& lazy : {whole.conj(), at::imag(whole.conj())}) {
    const auto value = lazy.resolve_conj().resolve_neg();
    const auto part = from_local(lazy.narrow(0, 4 * mesh.local_rank(), 4), mesh, {Shard{0}});
    EXPECT_TENSORS_EQUAL(reals(part.full_tensor()), reals(value));
    EXPECT_TENSORS_EQUAL(reals(part.redistribute({Shard{1}}).full_tensor()), reals(value));
    EXPECT_TENSORS_EQUAL(reals(part.redistribute_async({Replicate{}}).wait().local()), reals(value));
    EXPECT_TENSORS_CLOSE(reals(from_local(lazy, mesh, {Partial{}}).full_tensor()), reals(value * mesh.size()));
  }
}

TEST(Api, GradientsFlowToLeavesOfEveryLayout) {
  const auto mesh = line_mesh();
  for (const auto& placement : whole_placements({5, 3}, mesh.size())) {
    auto leaf = distribute_tensor(values(), mesh, {placement}).set_requires_grad(true);
    const auto plain = values().requires_grad_();
    const auto run = [](const Tensor& t) { return (t.t().mm(t) * 0.1).tanh().sum(); };
    run(leaf).backward();
    run(plain).backward();
    EXPECT_TENSORS_CLOSE(DTensor(leaf.grad()).full_tensor(), plain.grad());
    EXPECT_EQ(DTensor(leaf.grad()).placements(), Placements{placement});
  }
}

TEST(Api, Prints) {
  const auto tensor = make(values(), line_mesh(), {Replicate{}});
  EXPECT_EQ(to_string(tensor).substr(0, to_string(tensor).find('\n')),
            "DTensor float[5, 3] (Replicate()) on " + mesh_text() + ", local part:");
  EXPECT_EQ(to_string(torch::ones({2})).find("DTensor"), std::string::npos);
}

TEST(Api, PrintsMetaTensors) {
  EXPECT_EQ(to_string(torch::empty({2, 3}, at::kMeta)), "meta tensor of shape [2, 3] and dtype Float, which has no values");
}

TEST(Errors, OfMoreBytesThanAreCounted) {
  const auto mesh = line_mesh();
  const auto n = mesh.size();
  const auto one = torch::zeros({1}, mesh.device());
  const auto large = one.expand({int64_t{1} << 60});
  EXPECT_EQ(from_local(large, mesh, {Replicate{}}).size(0), int64_t{1} << 60);
  EXPECT_THROWS_WITH(Spec::intern(mesh, {Shard{0}}, {(int64_t{1} << 60) + 1}, at::kFloat),
                     "a tensor of 1152921504606846977 elements of Float has more than 2^62 bytes: placements (Shard(0))");
  EXPECT_THROWS_WITH(Spec::intern(mesh, {Replicate{}}, {int64_t{1} << 59}, at::kComplexDouble), "has more than 2^62 bytes");
  if (n == 1) return;
  EXPECT_THROWS_WITH(
      from_local(one.expand({int64_t{1} << 62}), mesh, {Shard{0}}),
      n == 2 ? "from_local: dim 0 of a local tensor of shape [4611686018427387904], on 2 ranks, has more elements" : "has more");
  EXPECT_THROWS_WITH(from_local(one, mesh, {RaggedShard{0, std::vector<int64_t>(n, int64_t{1} << 62)}}),
                     "add up to more than 64 bits count");
}

TEST(Errors, SayWhatToDo) {
  const auto mesh = line_mesh();
  const auto tensor = make(values(), mesh, {Shard{0}});
  EXPECT_THROWS_WITH(tensor + values(),
                     "aten::add.Tensor: a plain tensor of shape [5, 3] (argument 'other') cannot be mixed with DTensors "
                     "(float[5, 3] (Shard(0)) on " +
                         mesh_text() + "). Make it one with distribute_tensor or from_local, or use ImplicitReplication");
  EXPECT_THROWS_WITH(values().copy_(tensor),
                     "aten::copy_: the written argument 'self' is a plain tensor of shape [5, 3], but others are DTensors "
                     "(float[5, 3] (Shard(0)) on " +
                         mesh_text() + "). Use full_tensor() or to_local() on those");
  EXPECT_THROWS_WITH(tensor.item(), "a Tensor with 15 elements cannot be converted to Scalar");
  const auto no_storage = "float[5, 3] (Shard(0)) on " + mesh_text() +
                          " was asked for: a DTensor has no storage of its own: its data is spread over the ranks of its mesh. "
                          "Use to_local() for this rank's part, full_tensor() or tessera::unsharded() for the whole, "
                          "tessera::to_string() to print it and tessera::checkpoint::save() to save it";
  for (int i = 0; i < 2; ++i) {
    EXPECT_THROWS_WITH(tensor.data_ptr(), "the data pointer of " + no_storage);
    EXPECT_THROWS_WITH(tensor.data_ptr<float>(), "the data pointer of " + no_storage);
    EXPECT_THROWS_WITH(tensor.detach().data_ptr(), "the data pointer of " + no_storage);
    EXPECT_THROWS_WITH(tensor.storage(), "the storage of " + no_storage);
  }
  std::ostringstream stream;
  EXPECT_THROWS_WITH(torch::save(Tensor(tensor), stream), "a DTensor");
  const auto sum = make(values(), mesh, {Partial{}});
  auto out = Tensor(sum);
  EXPECT_THROWS_WITH(at::sin_out(out, sum),
                     "aten::sin.out: the written tensor would have to change its placement, which an out= argument cannot. Use "
                     "the operator that returns a new tensor, and copy_ its result into that argument; "
                     "arguments float[5, 3] (Partial(sum)) on " +
                         mesh_text());
  EXPECT_THROWS_WITH(tensor.add(make(torch::ones({4, 3}), mesh, {Replicate{}})),
                     "aten::add.Tensor: the shape [4, 3] does not broadcast");
  EXPECT_THROWS_WITH(make(torch::ones({3}), mesh, {Replicate{}}).add_(tensor),
                     "aten::add_.Tensor: the written tensor has shape [3], but the result has shape [5, 3]");
  EXPECT_THROWS_WITH(tensor.mm(tensor), "aten::mm: the shape [5, 3] of argument 1 does not fit the others (mk,kn->mn)");
  EXPECT_THROWS_WITH(tensor.to(at::kMeta), c10::str("a DTensor stays on its mesh's device (",
                                                    c10::DeviceTypeName(test_device_type(), /*lower_case=*/true), "), not meta"));
  EXPECT_THROWS_WITH(tensor.view({7, 2}), "aten::view: shape [7, 2] is invalid for a tensor of shape [5, 3]");
  EXPECT_THROWS_WITH(Tensor(tensor).resize_({15}), "aten::resize_: no sharding rule for this operator");
  EXPECT_THROWS_WITH(from_local(at::Tensor(), mesh, {Shard{0}}), "from_local: the tensor is undefined");
  EXPECT_THROWS_WITH(distribute_tensor(at::Tensor(), mesh, {Shard{0}}), "distribute_tensor: the tensor is undefined");
  EXPECT_THROWS_WITH(from_local(values().to_sparse(), mesh, {Shard{0}}), "from_local: the tensor's layout is Sparse");
  EXPECT_THROWS_WITH(distribute_tensor(values().to_sparse(), mesh, {Shard{0}}),
                     "distribute_tensor: the tensor's layout is Sparse; only strided tensors can be sharded");
  auto pending = tensor.redistribute_async({Replicate{}});
  auto taken = std::move(pending);
  EXPECT_TENSORS_EQUAL(taken.wait().local(), values());
  EXPECT_THROWS_WITH(pending.wait(), "wait: this PendingDTensor was moved from"); // NOLINT(bugprone-use-after-move)
  EXPECT_THROWS_WITH(pending.is_completed(),
                     "is_completed: this PendingDTensor was moved from"); // NOLINT(bugprone-use-after-move)
  const auto other = init_device_mesh(test_device_type(), {mesh.size()}, {"other"});
  EXPECT_THROWS_WITH(tensor + make(values(), other, {Shard{0}}), "aten::add.Tensor: the arguments lie on different meshes: ");
  EXPECT_THROWS_WITH(distribute_tensor(tensor, mesh, {Shard{0}}),
                     "distribute_tensor: the tensor is a DTensor already; use redistribute");
  EXPECT_THROWS_WITH(distribute_tensor(values().requires_grad_() * 2, mesh, {Shard{0}}),
                     "distribute_tensor: the tensor is the result of operators that autograd has recorded");
}

/// Collects warnings in place of printing them.
struct Warnings : c10::WarningHandler {
  void process(const c10::Warning& warning) override { texts.push_back(warning.msg()); }
  std::vector<std::string> texts;
};

using CallOnMesh = std::function<Tensor(const DeviceMesh&, bool disagrees)>;

/// `call` on all ranks of `mesh`, of which the last disagrees, is an error that has `texts`.
void expect_disagreement_on(const DeviceMesh& mesh, const CallOnMesh& call, std::vector<std::string> texts) {
  const auto message = error_of([&] {
    whole_of(call(mesh, world_rank() == last_rank())).sum().item(); // a device finds it when the host waits
  });
  texts.emplace_back("called different collectives");
  for (const auto& text : texts) EXPECT_NE(message.find(text), std::string::npos) << message;
}

/// The same on ranks in threads, and on those of this job where there is an order of them that no other test took, `rotation`: a
/// group that failed is of no more use.
void expect_disagreement(int64_t rotation, const CallOnMesh& call, const std::vector<std::string>& texts) {
  const auto n = world_size();
  if (n == 1) GTEST_SKIP() << "needs more ranks";
  run_ranks_as_threads(static_cast<int>(n), [&] { expect_disagreement_on(init_device_mesh(at::kCPU, {n}), call, texts); });
  std::vector<int64_t> ranks(n);
  std::iota(ranks.begin(), ranks.end(), 0);
  std::rotate(ranks.begin(), ranks.begin() + rotation % n, ranks.end());
  auto of_group = texts;
  of_group.emplace_back("the ranks of the group called different collectives");
  if (rotation < n) expect_disagreement_on(make_device_mesh(test_device_type(), {n}, ranks), call, of_group);
}

TEST(Disagreement, OnTheShapeThatIsDistributed) {
  expect_disagreement(1,
                      [](const DeviceMesh& mesh, bool odd) {
                        return distribute_tensor(odd ? torch::ones({3, 4}) : torch::ones({4, 3}), mesh, {Replicate{}});
                      },
                      {"'distribute_tensor: float[4, 3] (Replicate())", "'distribute_tensor: float[3, 4] (Replicate())"});
}

TEST(Disagreement, OnThePlacementOfLocalParts) {
  expect_disagreement(2,
                      [](const DeviceMesh& mesh, bool odd) {
                        return from_local(torch::ones({2, 2}, mesh.device()), mesh, {Shard{odd ? 1 : 0}}).full_tensor();
                      },
                      {"(Shard(0)) -> (Replicate())", "(Shard(1)) -> (Replicate())"});
}

TEST(Fallback, RunsOnWholeTensorsWithOneWarningOfOneRank) {
  const auto mesh = line_mesh();
  const auto tensor = make(values(), mesh, {Shard{0}});
  Warnings warnings;
  const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
  for (int i = 0; i < 3; ++i) EXPECT_TENSORS_CLOSE(DTensor(torch::pdist(tensor)).full_tensor(), torch::pdist(values()));
  std::vector<std::string> expected;
  if (world_rank() == 0) {
    expected.emplace_back(
        "aten::_pdist_forward: no sharding rule for this operator; its arguments are redistributed to Replicate(). Under "
        "tessera::StrictSharding this is an error. (This warning comes once, from one rank.)");
  }
  EXPECT_EQ(warnings.texts, expected);
  const StrictSharding strict;
  EXPECT_THROWS_WITH(
      torch::pdist(tensor),
      "aten::_pdist_forward: no sharding rule for this operator; arguments float[5, 3] (Shard(0)) on " + mesh_text());
  EXPECT_NO_THROW(torch::pdist(tensor.redistribute({Replicate{}})));
}

TEST(Fallback, FindsShapesThatDependOnTheData) {
  const auto mesh = line_mesh();
  for (const auto& placement : whole_placements({5, 3}, mesh.size())) {
    const auto tensor = make(values(), mesh, {placement});
    for (int i = 0; i < 2; ++i) {
      EXPECT_TENSORS_EQUAL(DTensor((tensor > 4.0 + i).nonzero()).full_tensor(), (values() > 4.0 + i).nonzero());
      EXPECT_TENSORS_EQUAL(DTensor(tensor.masked_select(tensor > 4.0 + i)).full_tensor(),
                           values().masked_select(values() > 4.0 + i));
    }
  }
}

TEST(CrossEntropy, DoesNotGatherTheClasses) {
  const auto mesh = line_mesh();
  torch::manual_seed(1);
  const auto logits = torch::randn({6, 7}, torch::kDouble), weight = torch::rand({7}, torch::kDouble) + 0.5;
  const auto target = torch::tensor({1, 6, 0, 3, -100, 5});
  for (const auto& placement : {Placement(Shard{1}), Placement(Shard{0}), Placement(Replicate{})}) {
    for (const int64_t reduction : {0, 1, 2}) {
      SCOPED_TRACE(to_string(placement) + ", reduction " + std::to_string(reduction));
      auto plain = logits.clone().requires_grad_();
      auto sharded = make(logits, mesh, {placement}).set_requires_grad(true);
      const auto expected = torch::cross_entropy_loss(plain, target, weight, reduction);
      const auto places = make(target, mesh, {Replicate{}}), weights = make(weight, mesh, {Replicate{}});
      process_context().reset_counters();
      const auto actual = torch::cross_entropy_loss(sharded, places, weights, reduction);
      expected.sum().backward();
      actual.sum().backward();
      EXPECT_EQ(process_context().count(CollectiveKind::kAllGather).calls, 0);
      EXPECT_TENSORS_CLOSE(DTensor(actual.detach()).full_tensor(), expected.detach());
      EXPECT_TENSORS_CLOSE(DTensor(sharded.grad()).full_tensor(), plain.grad());
      EXPECT_EQ(DTensor(sharded.grad()).placements(), Placements{placement});
    }
  }
  if (!tests_the_cpu()) return; // a device finds such an index later, or ends with it
  auto wrong = target.clone();
  wrong[1] = 7;
  EXPECT_THROWS_WITH(
      torch::nll_loss(make(logits, mesh, {Shard{0}}), make(wrong, mesh, {Replicate{}})),
      mesh.size() == 1 ? "Target 7 is out of bounds" : "aten::nll_loss_forward: 1 targets are not among the 7 classes");
}

TEST(CrossEntropy, SmoothsAPlainTargetInsideImplicitReplication) {
  const auto mesh = line_mesh();
  const auto target = torch::tensor({1, 6, 0, 3, -100, 5}, mesh.device());
  const auto logits = (torch::arange(42, torch::kDouble) * 0.7).sin().view({6, 7});
  const ImplicitReplication scope;
  for (const auto& placement : {Placement(Shard{1}), Placement(Shard{0}), Placement(Replicate{}), Placement(Partial{})}) {
    for (const int64_t reduction : {0, 1, 2}) {
      SCOPED_TRACE(to_string(placement) + ", reduction " + std::to_string(reduction));
      auto plain = logits.clone().requires_grad_();
      auto sharded = make(logits, mesh, {placement}).set_requires_grad(true);
      const auto expected = torch::cross_entropy_loss(plain, target.cpu(), {}, reduction, -100, 0.1);
      const auto actual = torch::cross_entropy_loss(sharded, target, {}, reduction, -100, 0.1);
      expected.sum().backward();
      actual.sum().backward();
      EXPECT_TENSORS_CLOSE(DTensor(actual.detach()).full_tensor(), expected.detach());
      EXPECT_TENSORS_CLOSE(DTensor(sharded.grad()).full_tensor(), plain.grad());
    }
  }
}

TEST(Mix, OfAReductionAndAPlainTensorIsAnError) {
  const torch::NoGradGuard no_grad;
  const auto tensor = make(values(), line_mesh(), {Shard{0}});
  EXPECT_THROWS_WITH(tensor.sum(0) + torch::ones({3}),
                     "aten::add.Tensor: a plain tensor of shape [3] (argument 'other') cannot be mixed with DTensors");
}

TEST(ImplicitReplication, CountsPlainTensorsAsReplicated) {
  const auto tensor = make(values(), line_mesh(), {Shard{0}});
  const ImplicitReplication scope;
  EXPECT_TENSORS_EQUAL(DTensor(tensor + values().to(test_device())).full_tensor(), values() * 2);
}

TEST(Dispatch, CachesPlans) {
  const auto mesh = line_mesh();
  const auto a = make(values(), mesh, {Shard{0}}), b = make(values(), mesh, {Shard{0}});
  internal::dispatch::clear_cache();
  const auto run = [&] {
    (a + b).mul_(2).sum();
    torch::cat({a, b});
    at::_foreach_add(std::vector<Tensor>{a, b}, 1);
    a.add(b, 3);
    a.view({-1});
  };
  run();
  const auto before = internal::dispatch::cache_statistics();
  for (int i = 0; i < 10; ++i) run();
  const auto after = internal::dispatch::cache_statistics();
  EXPECT_EQ(after.misses, before.misses);
  EXPECT_EQ(after.hits - before.hits, 70);
  EXPECT_EQ((a + b).scalar_type(), at::kFloat);
  EXPECT_EQ(a.to(at::kLong).mul(2).scalar_type(), at::kLong);
  EXPECT_EQ(a.to(at::kLong).mul(0.5).scalar_type(), at::kFloat);
  EXPECT_EQ(a.to(at::kLong).mul(2).scalar_type(), at::kLong);
}

TEST(Dispatch, RunsUnderAutocast) {
  const auto mesh = line_mesh();
  const auto run = [](const Tensor& x, const Tensor& w) {
    const AutocastScope scope(x.device().type());
    return x.mm(w).relu().to(at::kFloat).sum();
  };
  const auto whole = torch::arange(12, torch::kFloat).view({3, 4});
  auto plain = whole.clone().requires_grad_();
  const auto expected = run(values(), plain);
  expected.backward();
  for (const auto& placement : whole_placements({3, 4}, mesh.size())) {
    auto leaf = make(whole, mesh, {placement}).set_requires_grad(true);
    const auto actual = run(make(values(), mesh, {Replicate{}}), leaf);
    actual.backward();
    EXPECT_TENSORS_CLOSE(DTensor(actual.detach()).full_tensor(), expected.detach(), 1e-2);
    EXPECT_TENSORS_CLOSE(DTensor(leaf.grad()).full_tensor(), plain.grad(), 1e-2);
    EXPECT_EQ(leaf.grad().scalar_type(), at::kFloat);
  }
}

TEST(Dispatch, IsBounded) {
  const auto mesh = line_mesh();
  for (int64_t i = 1; i < 9000; ++i) make(torch::ones({1}), mesh, {Replicate{}}).expand({i});
  EXPECT_LE(internal::dispatch::cache_statistics().entries, 8192u);
}

TEST(Dispatch, RunsInManyThreads) {
  const auto mesh = line_mesh();
  const auto a = make(values(), mesh, {Shard{0}});
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 200; ++i) {
        const auto view = (a * 2).view({-1});
        view.add_(1);
        if (!DTensor((a + a).add(1).t()).local().equal(DTensor((a * 2 + 1).t()).local())) ++wrong;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

} // namespace
} // namespace tessera::testing::api_test
