// A RaggedShard of the parts that mesh dims before it made of the same tensor dims.
#include <tessera/dtensor/layout/sharding_math.h>
#include <tessera/dtensor/tensor/pieces.h>

#include <random>

#include <tessera/tests/dtensor/layouts.h>

namespace tessera::testing::nested_ragged_test {
namespace {

using Sizes = std::vector<int64_t>;

struct Case {
  Sizes shape, sizes; ///< of the mesh, and of the tensor
  Placements placements;
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << to_string(c.placements) << " of [" << c10::IntArrayRef(c.sizes) << "] on [" << c10::IntArrayRef(c.shape) << ']';
}

DeviceMesh mesh_of(const Sizes& shape) {
  const std::vector<std::string> names{"a", "b", "c"};
  return init_device_mesh(test_device_type(), shape, {names.begin(), names.begin() + static_cast<int64_t>(shape.size())});
}

std::vector<Sizes> mesh_shapes() {
  const auto n = world_size();
  std::vector<Sizes> shapes{{1, n}, {n, 1}};
  if (n == 4) shapes.insert(shapes.end(), {{2, 2}, {2, 1, 2}, {1, 2, 2}});
  return shapes;
}

/// Even, all on the last rank, and at random.
std::vector<RankValues> extents_of(int64_t positions, int64_t ranks, std::mt19937& random) {
  std::vector<int64_t> even, last(static_cast<size_t>(ranks), 0), drawn;
  for (int64_t r = 0; r < ranks; ++r) even.push_back(internal::chunk_extent(positions, ranks, r).size);
  last.back() = positions;
  for (auto rest = positions; static_cast<int64_t>(drawn.size()) < ranks; rest -= drawn.back())
    drawn.push_back(static_cast<int64_t>(drawn.size()) == ranks - 1 ? rest : static_cast<int64_t>(random() % (rest + 1)));
  return {even, last, drawn};
}

/// The tensor's first dims are split by a mesh dim, and what is left by a RaggedShard on the last one.
std::vector<Case> cases() {
  std::mt19937 random(11);
  std::vector<Case> result;
  const std::vector<Sizes> tensors{{5, 3}, {4, 6}, {7}, {1}, {1, 3}, {3, 1}, {0, 3}, {3, 0}, {2, 3, 4}, {3, 5, 2}, {1, 1}};
  for (const auto& shape : mesh_shapes()) {
    for (const auto& sizes : tensors) {
      for (int64_t dim = 0; dim < static_cast<int64_t>(sizes.size()); ++dim) {
        for (const auto& outer : {Placement(Shard{dim}), Placement(StridedShard{dim, 2}), Placement(Replicate{})}) {
          Placements before{outer};
          if (shape.size() == 3) before.emplace_back(is_strided(outer) ? Placement(Replicate{}) : Shard{0});
          for (int64_t last = 0; last < static_cast<int64_t>(sizes.size()); ++last) {
            for (auto& extents : extents_of(internal::largest_positions(sizes, shape, before, last), shape.back(), random)) {
              auto placements = before;
              placements.emplace_back(RaggedShard{last, extents});
              if (internal::is_nested(placements)) result.push_back({shape, sizes, std::move(placements)});
            }
          }
        }
      }
    }
  }
  return result;
}

at::Tensor values(const Sizes& sizes) {
  return torch::arange(1, internal::product(sizes, 0, sizes.size()) + 1, torch::kFloat).view(sizes);
}

/// Of 1-element and empty tensors too, whose parts mostly have nothing.
TEST(NestedRagged, IsDistributedAndMadeWhole) {
  for (const auto& c : sweep(cases(), 120)) {
    const auto mesh = mesh_of(c.shape);
    const auto whole = values(c.sizes);
    const auto part = lay_out(whole, mesh, c.placements);
    const auto tensor = distribute_tensor(whole, mesh, c.placements);
    EXPECT_EQ(tensor.spec().local_sizes(), part.sizes().vec()) << c;
    EXPECT_TENSORS_EQUAL(tensor.local(), part) << c;
    EXPECT_TENSORS_EQUAL(tensor.full_tensor(), whole) << c;
    EXPECT_TENSORS_EQUAL(whole_of(tensor.mul(2).sum()), whole.mul(2).sum()) << c;
    if (part.numel() == 0) continue;
    const auto first = part.flatten()[0].item<double>() - 1; // where it lies in the flattened tensor
    const auto row = internal::product(c.sizes, c.sizes.size() - part.dim() + 1, c.sizes.size());
    EXPECT_EQ(tensor.spec().local_offsets()[0], static_cast<int64_t>(first) / row) << c;
  }
}

TEST(NestedRagged, MovesToAndFromEveryPlacement) {
  std::mt19937 random(3);
  const auto all = cases();
  for (const auto& c : sweep(all, 100)) {
    const auto mesh = mesh_of(c.shape);
    const auto whole = values(c.sizes);
    const auto tensor = make(whole, mesh, c.placements);
    for (int64_t tries = 0; tries < 4; ++tries) {
      auto other = c.placements;
      const auto& drawn = all[random() % all.size()];
      if (drawn.shape == c.shape && drawn.sizes == c.sizes) {
        other = drawn.placements;
      } else {
        for (auto& placement : other)
          placement = random() % 2 == 0 ? Placement(Replicate{}) : Shard{static_cast<int64_t>(random() % c.sizes.size())};
      }
      const auto moved = tensor.redistribute(other);
      EXPECT_TENSORS_EQUAL(moved.local(), lay_out(whole, mesh, other)) << c << " to " << to_string(other);
      EXPECT_TENSORS_EQUAL(moved.redistribute(c.placements).local(), tensor.local()) << c << " from " << to_string(other);
    }
    Placements sums(c.placements.size(), Partial{});
    EXPECT_TENSORS_CLOSE(make(whole, mesh, sums).redistribute(c.placements).local(), tensor.local()) << c << " from sums";
  }
}

/// As boxes of the whole tensor, each element once.
TEST(NestedRagged, IsDescribedByBoxes) {
  for (const auto& c : sweep(cases(), 200)) {
    const auto mesh = mesh_of(c.shape);
    const auto whole = values(c.sizes);
    const auto spec = Spec::intern(mesh, c.placements, c.sizes, at::kFloat);
    const auto part = lay_out(whole, mesh, c.placements).cpu();
    auto held = torch::zeros(c.sizes);
    for (const auto& [box, data] : internal::pieces_of_part(part, *spec, *mesh.coordinate())) {
      EXPECT_GT(data.numel(), 0) << c;
      EXPECT_TENSORS_EQUAL(data, internal::narrow(whole, box)) << c << ' ' << internal::to_string(box);
      internal::narrow(held, box).add_(1);
    }
    EXPECT_EQ(held.sum().item<double>(), static_cast<double>(part.numel())) << c;
    auto summed = held.to(mesh.device());
    if (summed.numel() > 0) mesh.flatten().communicator()->all_reduce(summed.view(-1), ReduceOp::kSum, "held").wait();
    int64_t copies = 1; // on the mesh dims that split nothing
    for (size_t m = 0; m < c.shape.size(); ++m) copies *= is_replicate(c.placements[m]) ? c.shape[m] : 1;
    EXPECT_TRUE(summed.eq(static_cast<double>(copies)).all().item<bool>()) << c;
  }
}

/// As on whole tensors: alone, beside others that lie alike or otherwise, and broadcast ones.
TEST(NestedRagged, OperatorsComputeAsOnWholeTensors) {
  for (const auto& c : sweep(cases(), 60)) {
    if (internal::product(c.sizes, 0, c.sizes.size()) == 0) continue;
    const auto mesh = mesh_of(c.shape);
    const auto x = values(c.sizes), y = x.flip(0).contiguous();
    const auto a = make(x, mesh, c.placements), b = make(y, mesh, c.placements);
    const auto shards = make(y, mesh, Placements(c.shape.size(), Shard{0})), whole = make(y, mesh, Placements(c.shape.size()));
    EXPECT_EQ(DTensor(a * b).placements(), c.placements) << c;
    for (const auto& other : {b, shards, whole}) {
      EXPECT_TENSORS_EQUAL(whole_of(a * other), x * y) << c;
      EXPECT_TENSORS_EQUAL(whole_of(other - a), y - x) << c;
    }
    for (size_t d = 0; d < c.sizes.size(); ++d) {
      const auto row = y.narrow(static_cast<int64_t>(d), 0, 1).contiguous();
      EXPECT_TENSORS_EQUAL(whole_of(a + make(row, mesh, Placements(c.shape.size()))), x + row) << c << " stretched dim " << d;
      EXPECT_TENSORS_CLOSE(whole_of(a.sum(static_cast<int64_t>(d))), x.sum(static_cast<int64_t>(d))) << c;
      EXPECT_TENSORS_EQUAL(whole_of(a.amax(static_cast<int64_t>(d))), x.amax(static_cast<int64_t>(d))) << c;
      EXPECT_TENSORS_EQUAL(whole_of(a.select(static_cast<int64_t>(d), 0)), x.select(static_cast<int64_t>(d), 0)) << c;
      EXPECT_TENSORS_EQUAL(whole_of(a.narrow(static_cast<int64_t>(d), 0, 1)), x.narrow(static_cast<int64_t>(d), 0, 1)) << c;
      EXPECT_TENSORS_CLOSE(whole_of(a.softmax(static_cast<int64_t>(d))), x.softmax(static_cast<int64_t>(d))) << c;
    }
    EXPECT_TENSORS_CLOSE(whole_of(a.norm()), x.norm()) << c;
    EXPECT_TENSORS_CLOSE(whole_of(a.mean()), x.mean()) << c;
    EXPECT_TENSORS_EQUAL(whole_of(a.flatten()), x.flatten()) << c;
    EXPECT_TENSORS_EQUAL(whole_of(a.transpose(0, -1).contiguous()), x.transpose(0, -1)) << c;
    EXPECT_TENSORS_EQUAL(whole_of(torch::cat({a, b})), torch::cat({x, y})) << c;
  }
}

/// What is written keeps its placements.
TEST(NestedRagged, IsWrittenInPlace) {
  for (const auto& c : sweep(cases(), 60)) {
    if (internal::product(c.sizes, 0, c.sizes.size()) == 0) continue;
    const auto mesh = mesh_of(c.shape);
    auto x = values(c.sizes);
    const auto a = make(x, mesh, c.placements);
    const auto check = [&](const char* what) {
      EXPECT_EQ(a.placements(), c.placements) << c << ' ' << what;
      EXPECT_TENSORS_CLOSE(a.full_tensor(), x) << c << ' ' << what;
    };
    const auto y = x.flip(0).contiguous();
    a.add_(make(y, mesh, Placements(c.shape.size(), Shard{0}))), x.add_(y), check("add_");
    a.copy_(y.to(mesh.device())), x.copy_(y), check("copy_");
    const auto indices = torch::tensor({x.size(0) - 1});
    const auto place = make(indices, mesh, Placements(c.shape.size()));
    a.index_fill_(0, place, 3), x.index_fill_(0, indices, 3), check("index_fill_");
    torch::manual_seed(5);
    a.normal_();
    torch::manual_seed(5);
    auto drawn = torch::empty(c.sizes, mesh.device());
    drawn.normal_();
    x.copy_(drawn), check("normal_");
    EXPECT_TENSORS_EQUAL(whole_of(torch::zeros_like(a)), torch::zeros(c.sizes)) << c;
  }
}

TEST(NestedRagged, GradientsLieAsTheTensor) {
  for (const auto& c : sweep(cases(), 40)) {
    const auto mesh = mesh_of(c.shape);
    const auto whole = values(c.sizes);
    auto local = lay_out(whole, mesh, c.placements).requires_grad_();
    const auto tensor = from_local(local, mesh, c.placements, c.sizes);
    (tensor.full_tensor() * whole.to(mesh.device())).sum().backward();
    EXPECT_TENSORS_EQUAL(local.grad(), lay_out(whole, mesh, c.placements)) << c;
  }
}

TEST(NestedRagged, WithoutGlobalSizesEvenPartsAreMeant) {
  const auto n = world_size();
  const auto mesh = mesh_of({n, 1});
  const auto tensor = from_local(torch::ones({3, 2}, mesh.device()), mesh, {Shard{0}, RaggedShard{0, {3}}});
  EXPECT_EQ(tensor.sizes(), (Sizes{3 * n, 2}));
}

TEST(NestedRagged, WhatDoesNotFitIsAnError) {
  const auto n = world_size();
  const auto mesh = mesh_of({n, 1});
  const auto spec = [&](const Placements& placements) { Spec::intern(mesh, placements, {4 * n, 2}, at::kFloat); };
  spec({Shard{0}, RaggedShard{0, {4}}});
  spec({Shard{0}, RaggedShard{1, {8}}});
  EXPECT_THROWS_WITH(spec({Shard{0}, RaggedShard{0, {5}}}),
                     "RaggedShard extents add up to 5, not to 4: placements (Shard(0), RaggedShard(0, [5])");
  const auto later = mesh_of({1, n});
  EXPECT_THROWS_WITH(Spec::intern(later, {RaggedShard{0, {4}}, Shard{0}}, {4, 2}, at::kFloat),
                     "tensor dim 0 is split by a RaggedShard and by a later mesh dim");
  const auto cube = mesh_of({1, n, 1});
  EXPECT_THROWS_WITH(Spec::intern(cube, {Shard{0}, StridedShard{0, 2}, RaggedShard{0, {4}}}, {4, 2}, at::kFloat),
                     "a RaggedShard of what a StridedShard split after another mesh dim");
}

} // namespace
} // namespace tessera::testing::nested_ragged_test
