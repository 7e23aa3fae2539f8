#include <tessera/dtensor/debug.h>
#include <tessera/dtensor/layout/sharding_math.h>
#include <tessera/dtensor/redistribute/redistribute.h>

#include <random>
#include <set>

#include <tessera/tests/dtensor/layouts.h>

#include <tessera/tests/support/autocast.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing::redistribute_test {
namespace {

/// Values that every Partial of `lay_out` splits without rounding.
at::Tensor values(const std::vector<int64_t>& sizes) {
  const auto numel = std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
  return torch::arange(1, numel + 1, torch::kFloat).view(sizes);
}

/// Counts what this rank sends to others over the communicators of a mesh.
class SentBytes {
 public:
  explicit SentBytes(const DeviceMesh& mesh) {
    for (int64_t d = 0; d < mesh.ndim(); ++d) communicators_.insert(mesh.communicator(d));
    communicators_.insert(mesh.flatten().communicator());
    start_ = count();
  }
  /// Of the rank that sends most. Every rank calls it.
  double most() const {
    auto sent = torch::tensor({count() - start_}).to(test_device());
    line_mesh().communicator()->all_reduce(sent, ReduceOp::kMax, "SentBytes").wait();
    return sent.item<double>();
  }

 private:
  /// An all-reduce is a reduce-scatter and an all-gather; what a rank has for itself it does not send.
  double count() const {
    double sum = 0;
    for (const auto& communicator : communicators_) {
      int64_t bytes = communicator->counters().get(CollectiveKind::kAllReduce).bytes;
      for (size_t kind = 0; kind < kCollectiveKinds; ++kind) {
        bytes += communicator->counters().get(static_cast<CollectiveKind>(kind)).bytes;
      }
      sum += static_cast<double>(bytes) * (communicator->size() - 1) / communicator->size();
    }
    return sum;
  }
  std::set<CommunicatorPtr> communicators_;
  double start_ = 0;
};

bool fits(const DeviceMesh& mesh, const Placements& placements, const std::vector<int64_t>& sizes) {
  try {
    Spec::intern(mesh, placements, sizes, at::kFloat);
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}

void check_move(const at::Tensor& whole, const DeviceMesh& mesh, const Placements& from, const Placements& to) {
  const auto source = make(whole, mesh, from);
  const auto before = source.local().clone();
  const auto moved = source.redistribute(to);
  const auto context = to_string(from) + " -> " + to_string(to) + " of " + source.spec().to_string();
  EXPECT_EQ(moved.sizes(), whole.sizes());
  EXPECT_EQ(moved.local().sizes(), lay_out(whole, mesh, to).sizes()) << context;
  bool partial = false;
  for (const auto& placement : to) partial = partial || is_partial(placement);
  if (!partial) {
    EXPECT_TENSORS_CLOSE(moved.local(), lay_out(whole, mesh, to)) << context;
  }
  EXPECT_TENSORS_CLOSE(moved.full_tensor(), whole) << context;
  EXPECT_TENSORS_EQUAL(source.local(), before) << context << ": the source changed";
}

TEST(Redistribute, EveryPairOnOneDim) {
  const auto mesh = line_mesh();
  for (const std::vector<int64_t>& sizes : std::vector<std::vector<int64_t>>{{8, 4}, {5, 3}, {1, 7}, {3}, {2, 3, 2}, {0, 3}}) {
    auto placements = whole_placements(sizes, mesh.size());
    for (const auto& placement : partials()) placements.push_back(placement);
    for (const auto& from : placements) {
      for (const auto& to : placements) check_move(values(sizes), mesh, {from}, {to});
    }
  }
}

TEST(Redistribute, PairsOnTwoDims) {
  if (world_size() != 4) GTEST_SKIP() << "needs 4 ranks";
  const auto mesh = init_device_mesh(test_device_type(), {2, 2}, {"replicate", "shard"});
  struct Case {
    std::vector<int64_t> sizes;
    Placements from, to;
  };
  std::vector<Case> cases;
  for (const std::vector<int64_t>& sizes : std::vector<std::vector<int64_t>>{{5, 3}, {4, 2}, {1, 3}}) {
    auto single = whole_placements(sizes, 2);
    single.emplace_back(Partial{});
    std::vector<Placements> pairs;
    for (const auto& a : single) {
      for (const auto& b : single) {
        if (fits(mesh, {a, b}, sizes)) pairs.push_back({a, b});
      }
    }
    for (const auto& from : pairs) {
      for (const auto& to : pairs) cases.push_back({sizes, from, to});
    }
  }
  for (const auto& c : sweep(cases, 300)) check_move(values(c.sizes), mesh, c.from, c.to);
}

/// A random placement of a tensor of `sizes` on the mesh dim after those of `outer`.
Placement random_placement(const std::vector<int64_t>& sizes, const DeviceMesh& mesh, const Placements& outer,
                           std::mt19937& random) {
  const auto draw = [&](int64_t below) { return static_cast<int64_t>(random() % static_cast<uint64_t>(below)); };
  const auto kind = sizes.empty() ? draw(2) * 3 : draw(9);
  if (kind == 0) return Replicate{};
  if (kind == 3) return Partial{};
  if (kind < 6) return Shard{draw(static_cast<int64_t>(sizes.size()))};
  if (kind == 6) return StridedShard{draw(static_cast<int64_t>(sizes.size())), 1 + draw(3)};
  const auto dim = draw(static_cast<int64_t>(sizes.size()));
  if (internal::ragged_mesh_dim(outer)) return Replicate{}; // there is at most one
  std::vector<int64_t> extents(static_cast<size_t>(mesh.size(static_cast<int64_t>(outer.size()))), 0);
  auto rest = internal::largest_positions(sizes, mesh.shape(), outer, dim);
  for (auto& extent : extents) {
    extent = draw(rest + 1);
    rest -= extent;
  }
  extents.back() += rest;
  return RaggedShard{dim, extents};
}

Placements random_placements(const std::vector<int64_t>& sizes, const DeviceMesh& mesh, std::mt19937& random) {
  Placements placements;
  while (static_cast<int64_t>(placements.size()) < mesh.ndim())
    placements.push_back(random_placement(sizes, mesh, placements, random));
  return placements;
}

TEST(Redistribute, RandomPairsOnMeshesOfUpToThreeDims) {
  std::vector<std::vector<int64_t>> shapes{{world_size()}, {1, world_size()}, {world_size(), 1, 1}};
  if (world_size() == 4) shapes.insert(shapes.end(), {{2, 2}, {2, 1, 2}, {1, 2, 2}});
  std::vector<DeviceMesh> meshes;
  for (const auto& shape : shapes) {
    std::vector<std::string> names;
    for (size_t d = 0; d < shape.size(); ++d) names.push_back("d" + std::to_string(d));
    meshes.push_back(init_device_mesh(test_device_type(), shape, names));
  }
  struct Case {
    size_t mesh;
    std::vector<int64_t> sizes;
    Placements from, to;
  };
  std::mt19937 random(5);
  std::vector<Case> cases;
  while (cases.size() < 10000) {
    Case c{random() % meshes.size(), {}, {}, {}};
    for (auto d = random() % 4; d > 0; --d) c.sizes.push_back(static_cast<int64_t>(random() % 7));
    for (auto* placements : {&c.from, &c.to}) {
      *placements = random_placements(c.sizes, meshes[c.mesh], random);
    }
    if (fits(meshes[c.mesh], c.from, c.sizes) && fits(meshes[c.mesh], c.to, c.sizes)) cases.push_back(std::move(c));
  }
  for (const auto& c : sweep(cases, 400)) {
    const auto whole = values(c.sizes);
    const auto source = make(whole, meshes[c.mesh], c.from);
    const auto context = to_string(c.from) + " -> " + to_string(c.to) + " of " + source.spec().to_string();
    const SentBytes direct(meshes[c.mesh]);
    const auto moved = source.redistribute(c.to);
    const auto bytes = direct.most();
    EXPECT_EQ(moved.placements(), source.spec().with(c.to)->placements()) << context;
    const auto again = make(whole, meshes[c.mesh], c.from); // `source` may keep what it was reduced to
    const SentBytes whole_way(meshes[c.mesh]);
    EXPECT_TENSORS_CLOSE(again.full_tensor(), whole) << context;
    EXPECT_LE(bytes, whole_way.most() + 1e-6) << context << ": gathering everything moves less";
    EXPECT_TENSORS_CLOSE(moved.full_tensor(), whole) << context;
  }
}

TEST(Redistribute, IsLoggedAndCounted) {
  const auto mesh = line_mesh();
  const auto tensor = make(values({8, 4}), mesh, {Shard{0}});
  const CountCollectives counted;
  const LogRedistributions outer;
  {
    const LogRedistributions log;
    tensor.redistribute({Replicate{}});
    tensor.mm(make(values({4, 2}), mesh, {Replicate{}}));
    tensor.relu();
    if (world_size() == 1) {
      EXPECT_TRUE(log.records().empty());
      EXPECT_EQ(counted.to_string(), "no collectives");
    } else {
      ASSERT_EQ(log.records().size(), 1u);
      EXPECT_EQ(log.records()[0].op, "redistribute");
      EXPECT_GE(log.records()[0].bytes, 8 * 4 * 4);
      const auto rows = (8 + world_size() - 1) / world_size() * world_size(); // padded
      EXPECT_EQ(log.to_string(), "redistribute: [8, 4] (Shard(0)) -> (Replicate()), " + std::to_string(rows * 16) + " bytes\n");
      EXPECT_EQ(counted.count(CollectiveKind::kAllGather).calls, 1);
      EXPECT_EQ(counted.total_calls(), 1);
    }
  }
  EXPECT_TRUE(outer.records().empty());
}

TEST(Redistribute, ZeroDimsAndOtherDtypes) {
  const auto mesh = line_mesh();
  check_move(torch::tensor(3.0F), mesh, {Partial{}}, {Replicate{}});
  check_move(torch::tensor(3.0F), mesh, {Replicate{}}, {Partial{}});
  for (const auto dtype : {at::kLong, at::kInt, at::kDouble, at::kByte}) {
    const auto whole = values({5, 2}).to(dtype);
    const auto source = from_local(lay_out(whole, mesh, {Shard{0}}), mesh, {Shard{0}}, whole.sizes().vec());
    EXPECT_TENSORS_EQUAL(source.full_tensor(), whole);
    EXPECT_TENSORS_EQUAL(source.redistribute({Shard{1}}).local(), lay_out(whole, mesh, {Shard{1}}));
  }
  const auto flags = torch::arange(6).remainder(2).to(at::kBool);
  const auto any = from_local(flags.to(mesh.device()), mesh, {Partial{Partial::Op::kMax}});
  EXPECT_TENSORS_EQUAL(any.full_tensor(), flags);
}

TEST(Redistribute, NormsOfNarrowTypesDoNotOverflow) {
  const auto mesh = line_mesh();
  for (const auto dtype : {at::kHalf, at::kBFloat16, at::kFloat}) {
    const auto parts = from_local(torch::full({2}, 1024).to(mesh.device(), dtype), mesh, {Partial{Partial::Op::kNorm}});
    EXPECT_TENSORS_CLOSE(parts.full_tensor(), torch::full({2}, 1024 * std::sqrt(mesh.size())).to(dtype), 1e-2);
  }
}

TEST(Redistribute, ANormHasNoSign) {
  const auto mesh = line_mesh();
  EXPECT_THROWS_WITH(make(-values({2}), mesh, {Replicate{}}).redistribute({Partial{Partial::Op::kNorm}}),
                     "redistribute: [2] (Replicate()) -> (Partial(norm 2)): a tensor with negative values cannot be turned into "
                     "a Partial(norm 2), which has no sign");
}

/// Ranks whose parts have none come to the same error, and stay in step.
TEST(Redistribute, ANormHasNoSignInThePartsOfOtherRanks) {
  if (world_size() != 4) GTEST_SKIP() << "needs a mesh of 2x2";
  const auto mesh = init_device_mesh(test_device_type(), {2, 2});
  const auto signs = torch::tensor({-1.0, -2.0, 3.0, 4.0});
  const Placement norm = Partial{Partial::Op::kNorm};
  const auto split = make(signs, mesh, {Replicate{}, Shard{0}});
  for (const auto& last : {Placement(Shard{0}), Placement(Replicate{}), norm}) {
    EXPECT_THROWS_WITH(split.redistribute({norm, last}), "a tensor with negative values cannot be turned into a Partial(norm 2)");
  }
  EXPECT_TENSORS_CLOSE(make(signs.abs(), mesh, {Replicate{}, Shard{0}}).redistribute({norm, Shard{0}}).full_tensor(),
                       signs.abs());
  const auto part = from_local((signs + 0.5).to(mesh.device()), mesh, {Replicate{}, norm}); // a part may have a sign
  EXPECT_TENSORS_CLOSE(part.redistribute({norm, norm}).full_tensor(), part.full_tensor());
}

TEST(Redistribute, Gradients) {
  const auto mesh = line_mesh();
  const auto whole = values({5, 3}).to(mesh.device());
  for (const auto& from : whole_placements({5, 3}, mesh.size())) {
    for (const auto& to : whole_placements({5, 3}, mesh.size())) {
      auto local = lay_out(whole, mesh, {from}).requires_grad_();
      const auto source = from_local(local, mesh, {from}, whole.sizes().vec());
      (source.redistribute({to}).full_tensor() * whole).sum().backward();
      EXPECT_TENSORS_EQUAL(local.grad(), lay_out(whole, mesh, {from})) << to_string(from) << " -> " << to_string(to);
    }
  }
}

TEST(Redistribute, GradientOfPartialIsReplicated) {
  const auto mesh = line_mesh();
  const auto whole = values({2, 2}).to(mesh.device());
  auto local = lay_out(whole, mesh, {Partial{}}).requires_grad_();
  (from_local(local, mesh, {Partial{}}).redistribute({Replicate{}}).full_tensor() * whole).sum().backward();
  EXPECT_TENSORS_EQUAL(local.grad(), whole);
}

TEST(Redistribute, CastsOnTheWay) {
  const auto mesh = line_mesh();
  const auto whole = values({5, 3});
  auto local = lay_out(whole, mesh, {Shard{0}}).requires_grad_();
  const auto source = from_local(local, mesh, {Shard{0}}, whole.sizes().vec());
  const auto moved = source.redistribute({Replicate{}}, {.forward_dtype = at::kBFloat16, .backward_dtype = at::kHalf});
  EXPECT_EQ(moved.scalar_type(), at::kBFloat16);
  EXPECT_EQ(moved.spec().dtype(), at::kBFloat16);
  EXPECT_TENSORS_EQUAL(moved.full_tensor().detach(), whole.to(at::kBFloat16));
  (moved.full_tensor() * torch::full({5, 3}, 0.1, mesh.device())).sum().backward();
  // 0.1 was rounded to bfloat16 by the product's cast and fits half; the gradient comes back in the tensor's own dtype.
  EXPECT_TENSORS_EQUAL(local.grad(), torch::full(local.sizes(), 0.1).to(at::kBFloat16).to(at::kFloat));
  EXPECT_TENSORS_EQUAL(source.redistribute({Shard{0}}, {.forward_dtype = at::kDouble}).full_tensor().detach(),
                       whole.to(at::kDouble));
}

TEST(Redistribute, InFlight) {
  const auto mesh = line_mesh();
  for (const std::vector<int64_t>& sizes : std::vector<std::vector<int64_t>>{{5, 3}, {1}, {0, 2}, {8, 4}}) {
    auto placements = whole_placements(sizes, mesh.size());
    for (const auto& placement : partials()) placements.push_back(placement);
    const auto whole = values(sizes);
    for (const auto& from : placements) {
      for (const auto& to : placements) {
        const auto source = make(whole, mesh, {from});
        const auto expected = source.redistribute({to});
        auto pending = source.redistribute_async({to});
        auto other = source.redistribute_async({Replicate{}}); // several at once
        const auto moved = pending.wait();
        EXPECT_TRUE(pending.is_completed());
        EXPECT_EQ(moved.placements(), expected.placements());
        EXPECT_TENSORS_EQUAL(moved.local(), expected.local()) << to_string(from) << " -> " << to_string(to);
        EXPECT_TENSORS_CLOSE(other.wait().local(), whole);
        EXPECT_EQ(pending.wait().unsafeGetTensorImpl(), moved.unsafeGetTensorImpl());
      }
    }
  }
  auto local = lay_out(values({5, 3}), mesh, {Shard{0}}).requires_grad_();
  auto pending = from_local(local, mesh, {Shard{0}}, std::vector<int64_t>{5, 3}).redistribute_async({Replicate{}});
  (pending.wait().full_tensor() * values({5, 3}).to(mesh.device())).sum().backward();
  EXPECT_TENSORS_EQUAL(local.grad(), lay_out(values({5, 3}), mesh, {Shard{0}}));
}

/// What is written before `wait`, also where the source gets a new place in the graph, does not reach the result.
TEST(Redistribute, AsynchronousBesideWritesToTheSource) {
  const auto mesh = line_mesh();
  const std::vector<int64_t> sizes{120, 61};
  auto placements = whole_placements(sizes, mesh.size());
  for (const auto op : {Partial::Op::kSum, Partial::Op::kAvg, Partial::Op::kMax}) placements.emplace_back(Partial{op});
  const auto whole = values(sizes);
  for (const auto& from : placements) {
    for (const auto& to : placements) {
      SCOPED_TRACE(::testing::Message() << to_string(from) << " " << to_string(to));
      const auto source = make(whole, mesh, {from});
      auto pending = source.redistribute_async({to});
      source.zero_();
      const auto moved = pending.wait();
      EXPECT_EQ(moved.placements(), Placements{to});
      EXPECT_TENSORS_CLOSE(moved.full_tensor(), whole);
      auto leaf = make(whole, mesh, {from}).set_requires_grad(true);
      if (is_partial(from)) continue; // not written in place
      const auto doubled = leaf * 2;
      auto other = DTensor(doubled).redistribute_async({to});
      doubled.mul_(5);
      other.wait().sum().backward();
      EXPECT_TENSORS_EQUAL(DTensor(leaf.grad()).full_tensor(), torch::full(sizes, 2.0F));
    }
  }
}

/// Few kernels know these types: collectives and slices move their bits.
TEST(Redistribute, OfUnsignedTypes) {
  const auto mesh = line_mesh();
  const auto whole = torch::arange(15).view({5, 3});
  auto placements = whole_placements({5, 3}, mesh.size());
  for (const auto op : {Partial::Op::kSum, Partial::Op::kMask, Partial::Op::kProduct}) placements.emplace_back(Partial{op});
  for (const auto type : {at::kUInt16, at::kUInt32, at::kUInt64}) {
    for (const auto& from : placements) {
      const auto source = distribute_tensor(whole.to(type), mesh, {from});
      EXPECT_TENSORS_EQUAL(source.full_tensor().to(at::kLong), whole) << type << " " << to_string(from);
      for (const auto& to : placements) {
        SCOPED_TRACE(::testing::Message() << type << " " << to_string(from) << " " << to_string(to));
        const auto moved = source.redistribute({to});
        EXPECT_EQ(moved.scalar_type(), type);
        EXPECT_TENSORS_EQUAL(moved.full_tensor().to(at::kLong), whole);
        EXPECT_TENSORS_EQUAL(source.redistribute_async({to}).wait().full_tensor().to(at::kLong), whole);
      }
    }
  }
}

TEST(Redistribute, BetweenMeshes) {
  const auto ranks = world_size();
  std::vector<int64_t> backwards(ranks);
  std::iota(backwards.rbegin(), backwards.rend(), 0);
  std::vector<DeviceMesh> meshes{line_mesh(), make_device_mesh(test_device_type(), {ranks}, backwards),
                                 init_device_mesh(test_device_type(), {1, ranks}, {"a", "b"})};
  if (ranks == 4) meshes.push_back(init_device_mesh(test_device_type(), {2, 2}, {"c", "d"}));
  struct Case {
    size_t from_mesh, to_mesh;
    std::vector<int64_t> sizes;
    Placements from, to;
  };
  std::mt19937 random(7);
  std::vector<Case> cases;
  while (cases.size() < 2000) {
    Case c{random() % meshes.size(), random() % meshes.size(), {}, {}, {}};
    for (auto d = random() % 4; d > 0; --d) c.sizes.push_back(static_cast<int64_t>(random() % 7));
    c.from = random_placements(c.sizes, meshes[c.from_mesh], random);
    c.to = random_placements(c.sizes, meshes[c.to_mesh], random);
    if (fits(meshes[c.from_mesh], c.from, c.sizes) && fits(meshes[c.to_mesh], c.to, c.sizes)) cases.push_back(std::move(c));
  }
  for (const auto& c : sweep(cases, 200)) {
    const auto whole = values(c.sizes);
    const auto source = make(whole, meshes[c.from_mesh], c.from);
    const auto moved = source.redistribute(meshes[c.to_mesh], c.to);
    const auto context = source.spec().to_string() + " -> " + moved.spec().to_string();
    EXPECT_EQ(moved.mesh(), meshes[c.to_mesh]);
    if (!moved.spec().has_partial()) {
      EXPECT_TENSORS_CLOSE(moved.local(), lay_out(whole, moved.mesh(), moved.placements())) << context;
    }
    EXPECT_TENSORS_CLOSE(moved.full_tensor(), whole) << context;
  }
}

TEST(Redistribute, BetweenMeshesMovesNoMoreThanItMustAndIsDifferentiable) {
  const auto ranks = world_size();
  std::vector<int64_t> backwards(ranks);
  std::iota(backwards.rbegin(), backwards.rend(), 0);
  const auto line = line_mesh(), reversed = make_device_mesh(test_device_type(), {ranks}, backwards);
  const auto whole = values({ranks * 2, 3}).to(test_device());
  auto local = lay_out(whole, line, {Shard{0}}).requires_grad_();
  const auto source = from_local(local, line, {Shard{0}});
  const CountCollectives counted;
  const auto moved = source.redistribute(reversed, {Shard{0}});
  EXPECT_LE(counted.total_bytes(), 2 * 3 * 4); // each rank sends its rows to one other
  EXPECT_TENSORS_EQUAL(moved.local().detach(), lay_out(whole, reversed, {Shard{0}}));
  (moved.full_tensor() * whole).sum().backward();
  EXPECT_TENSORS_EQUAL(local.grad(), lay_out(whole, line, {Shard{0}}));
}

TEST(Redistribute, BetweenMeshesOverOtherRanksIsAnError) {
  if (world_size() == 1) GTEST_SKIP() << "needs other ranks";
  const auto source = make(values({4}), line_mesh(), {Shard{0}});
  EXPECT_THROWS_WITH(source.redistribute(make_device_mesh(test_device_type(), {1}, {0}), {Replicate{}}),
                     "redistribute: a tensor moves only between meshes over the same ranks, not from float[4] (Shard(0)) on");
}

TEST(Redistribute, PlansAreCheapAndNeverCross) {
  using Steps = std::vector<internal::RedistributeStep>;
  const auto plan = [](const Placements& from, const Placements& to) {
    return internal::plan_redistribute(from, to, {2, 2}, {512, 512}, 4);
  };
  const Placement replicate = Replicate{}, partial = Partial{}, shard0 = Shard{0}, shard1 = Shard{1};
  EXPECT_EQ(plan({shard0, partial}, {replicate, replicate}), (Steps{{{1}, replicate}, {{0}, replicate}}));
  EXPECT_EQ(plan({partial, replicate}, {shard0, shard0}), (Steps{{{0}, shard0}, {{1}, shard0}}));
  EXPECT_EQ(plan({shard0, shard0}, {shard1, shard0}), (Steps{{{0, 1}, shard1}, {{1}, shard0}}));
  EXPECT_EQ(plan({replicate, shard0}, {shard0, replicate}), (Steps{{{1}, replicate}, {{0}, shard0}}));
  EXPECT_EQ(plan({shard0, shard1}, {shard0, shard1}), Steps{});
  EXPECT_EQ(plan({shard0, shard0}, {replicate, replicate}), (Steps{{{0, 1}, replicate}}));
  EXPECT_EQ(plan({partial, partial}, {shard1, shard1}), (Steps{{{0, 1}, shard1}}));
}

/// Autocast knows operators that join tensors, and one kind of half precision on each type of device.
TEST(Redistribute, MovesEveryDtypeInAnAutocastRegion) {
  const auto mesh = line_mesh();
  std::vector<int64_t> rows;
  for (int64_t rank = 0; rank < mesh.size(0); ++rank) rows.push_back(rank + 1);
  const int64_t size = std::accumulate(rows.begin(), rows.end(), int64_t{0});
  const std::vector<Placement> placements{Shard{0}, Shard{1}, RaggedShard{0, rows}, Replicate{}};
  for (const auto dtype : {torch::kHalf, torch::kBFloat16, torch::kFloat, torch::kDouble}) {
    const auto whole = values({size, 3}).to(dtype);
    for (const auto& from : placements) {
      const auto tensor = distribute_tensor(whole, mesh, {from});
      const AutocastScope autocast;
      for (const auto& to : placements) {
        const auto moved = tensor.redistribute({to});
        EXPECT_EQ(moved.scalar_type(), dtype);
        EXPECT_TENSORS_EQUAL(moved.full_tensor().cpu(), whole);
      }
    }
  }
}

} // namespace
} // namespace tessera::testing::redistribute_test
