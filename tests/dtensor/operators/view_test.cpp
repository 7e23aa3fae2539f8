#include <c10/core/InferenceMode.h>

#include <tessera/dtensor/debug.h>

#include <tessera/tests/dtensor/layouts.h>

namespace tessera::testing::view_test {
namespace {

using at::Tensor;

Tensor values() { return torch::arange(24, torch::kFloat).view({6, 4}); }

Tensor full(const Tensor& tensor) { return DTensor(tensor).full_tensor(); }

bool is_copy(const Tensor& view) { return internal::dtensor_meta(view)->copied_at_version.has_value(); }

struct View {
  std::string name;
  std::function<Tensor(const Tensor&)> take;
};

std::vector<View> views() {
  return {{"detach", [](const Tensor& t) { return t.detach(); }},
          {"alias", [](const Tensor& t) { return torch::alias(t); }},
          {"view",
           [](const Tensor& t) {
             return t.view({2, 3, 4});
           }},
          {"flatten", [](const Tensor& t) { return t.view({-1}); }},
          {"t", [](const Tensor& t) { return t.t(); }},
          {"transpose", [](const Tensor& t) { return t.transpose(0, 1); }},
          {"unsqueeze", [](const Tensor& t) { return t.unsqueeze(0); }},
          {"squeeze", [](const Tensor& t) { return t.unsqueeze(1).squeeze(1); }},
          {"slice 0", [](const Tensor& t) { return t.slice(0, 1, 5); }},
          {"slice 0 step", [](const Tensor& t) { return t.slice(0, 1, 6, 2); }},
          {"slice 1", [](const Tensor& t) { return t.slice(1, 1, 3); }},
          {"narrow", [](const Tensor& t) { return t.narrow(0, 2, 3); }},
          {"select 0", [](const Tensor& t) { return t[4]; }},
          {"select 1", [](const Tensor& t) { return t.select(1, 2); }},
          {"chunk 0", [](const Tensor& t) { return t.chunk(2, 0)[1]; }},
          {"split 1", [](const Tensor& t) { return t.split(3, 1)[0]; }},
          {"unbind", [](const Tensor& t) { return t.unbind(0)[3]; }},
          {"diagonal", [](const Tensor& t) { return t.diagonal(); }}};
}

TEST(View, WritesReachTheBaseOrAreRefused) {
  const auto mesh = line_mesh();
  torch::NoGradGuard no_grad;
  for (const auto& placement : whole_placements({6, 4}, mesh.size())) {
    for (const auto& view : views()) {
      SCOPED_TRACE(view.name + " of " + to_string(placement));
      const auto plain = values();
      const auto base = make(plain, mesh, {placement});
      const auto part = view.take(base);
      EXPECT_TENSORS_EQUAL(full(part), view.take(plain).contiguous());
      if (is_copy(part)) {
        EXPECT_THROWS_WITH(part.mul_(2),
                           "this view of a DTensor could not alias it, because its data had to move between ranks, or its part "
                           "has gaps; writing into it would not reach the original");
        EXPECT_TENSORS_EQUAL(full(base), plain);
        base.add_(1);
        EXPECT_THROWS_WITH(part.add(1), "the DTensor behind this view was written after the view was taken");
      } else {
        part.mul_(2);
        view.take(plain).mul_(2);
        EXPECT_TENSORS_EQUAL(full(base), plain);
        base.add_(1);
        plain.add_(1);
        EXPECT_TENSORS_EQUAL(full(part), view.take(plain).contiguous());
      }
    }
  }
}

TEST(View, RowsOfASplitDimAlias) {
  const auto mesh = line_mesh();
  for (const Placement& placement : std::vector<Placement>{Shard{0}, ragged_shards({6, 4}, mesh.size()).front()}) {
    const auto base = make(values(), mesh, {placement});
    for (const auto& part : {base.slice(0, 1, 5), base[4], base.chunk(2)[1], base.view({2, 3, 4}), base.view({-1})}) {
      EXPECT_FALSE(is_copy(part));
    }
    EXPECT_FALSE(is_copy(make(values(), mesh, {Shard{1}}).t()));
  }
}

/// The whole is laid out in memory as the parts are.
TEST(View, OfPartsThatAreNotRowMajor) {
  const auto mesh = line_mesh();
  const auto ranks = mesh.size();
  const auto rows = torch::arange(12 * ranks, torch::kFloat).view({3, 4 * ranks}), whole = rows.t();
  const auto part = rows.narrow(1, 4 * mesh.local_rank(), 4).contiguous().t().to(mesh.device());
  const auto x = from_local(part, mesh, {Shard{0}});
  EXPECT_EQ(x.strides(), whole.strides());
  EXPECT_TENSORS_EQUAL(full(x.reshape({-1})), whole.reshape({-1}));
  EXPECT_TENSORS_EQUAL(full(x.t().view({-1})), rows.view({-1}));
  const auto column = torch::zeros({8, 1}, mesh.device());
  EXPECT_EQ(from_local(column, mesh, {Shard{1}}).strides(), (std::vector<int64_t>{ranks, 1}));

  const auto image = torch::arange(200, torch::kFloat).view({4, 2, 5, 5}), weight = torch::ones({3, 2, 3, 3});
  const auto expected = torch::conv2d(image, weight).flatten(1);
  for (const auto& placement : whole_placements({4, 2, 5, 5}, ranks)) {
    SCOPED_TRACE(to_string(placement));
    const auto input = make(image, mesh, {placement}).contiguous(at::MemoryFormat::ChannelsLast);
    EXPECT_TENSORS_CLOSE(full(torch::conv2d(input, make(weight, mesh, {Replicate{}})).flatten(1)), expected);
  }
}

/// This rank's part as a program's own views give it, in the memory of `whole`.
Tensor narrowed(const Tensor& whole, const Placement& placement) {
  const auto* shard = std::get_if<Shard>(&placement);
  if (!shard) return whole;
  const auto chunks = whole.chunk(world_size(), shard->dim);
  return world_rank() < std::ssize(chunks) ? chunks[world_rank()] : whole.narrow(shard->dim, 0, 0);
}

struct Strided {
  const char* name;
  Tensor whole;
  bool overlaps = false;
};

/// Of sizes that the ranks do not divide: some have a single row, a single column or nothing.
std::vector<Strided> with_gaps() {
  const auto rows = world_size() + 1, columns = 2 * world_size() + 1;
  const auto base = torch::arange(rows * 2 * columns, torch::kFloat).view({rows, 2 * columns}).to(test_device());
  return {{"all but the first columns", base.slice(1, columns)},
          {"every second column", base.slice(1, 0, 2 * columns, 2)},
          {"every second row and column", torch::cat({base, base}).slice(0, 0, 2 * rows, 2).slice(1, 0, 2 * columns, 2)},
          {"a row, expanded", base[0].slice(0, 0, columns).expand({rows, columns}), true},
          {"a column, expanded", base.slice(1, 0, 1).expand({rows, columns}), true},
          {"windows", base.view({-1}).slice(0, 0, rows + columns - 1).unfold(0, columns, 1), true}};
}

bool is_flat_in_memory(const Tensor& plain) {
  return error_of([&] { plain.view({-1}); }) == "no error";
}

void check_gaps(const Strided& strided, const Placement& placement) {
  const auto mesh = line_mesh();
  const auto part = narrowed(strided.whole, placement), leaf = part.detach().requires_grad_();
  const auto sizes = strided.whole.sizes().vec();
  const auto whole = (strided.whole * (is_partial(placement) ? world_size() : 1)).contiguous();
  const Tensor x = from_local(leaf, mesh, {placement}, sizes), flat = x.flatten(), view = x.detach().view({-1});
  EXPECT_EQ(x.strides(), whole.strides());
  EXPECT_TENSORS_EQUAL(full((x * 2).detach()), whole * 2);
  EXPECT_TENSORS_EQUAL(full(flat.detach()), whole.flatten());
  EXPECT_TENSORS_EQUAL(full(view), whole.flatten());
  EXPECT_TENSORS_EQUAL(full(x.reshape({sizes[1], sizes[0]}).detach()), whole.reshape({sizes[1], sizes[0]}));
  EXPECT_TENSORS_EQUAL(full(x.unsqueeze(1).detach()), whole.unsqueeze(1));
  EXPECT_FALSE(is_copy(x.unsqueeze(1)));
  const bool moves = placement == Placement(Shard{1}) && world_size() > 1;
  EXPECT_EQ(is_copy(view), moves || !is_flat_in_memory(strided.whole));
  flat.square().sum().backward();
  EXPECT_TENSORS_CLOSE(leaf.grad(), 2 * (is_partial(placement) ? whole : part));
}

/// Random numbers are those of one device, and a view that is a copy is one on every rank.
void check_writes_beside_gaps(const Strided& strided, const Placement& placement) {
  const Tensor x = from_local(narrowed(strided.whole.detach(), placement), line_mesh(), {placement}, strided.whole.sizes().vec()),
               view = x.view({-1});
  const auto expected = torch::empty(strided.whole.sizes(), torch::TensorOptions(torch::kFloat).device(twin_device()));
  torch::manual_seed(5);
  expected.normal_();
  torch::manual_seed(5);
  x.normal_();
  EXPECT_TENSORS_EQUAL(full(x), expected);
  if (is_copy(view)) {
    EXPECT_THROWS_WITH(view.mul_(2), "this view of a DTensor could not alias it");
    EXPECT_THROWS_WITH(full(view), "the DTensor behind this view was written after the view was taken");
  } else {
    view.mul_(2);
    EXPECT_TENSORS_EQUAL(full(x), expected * 2);
  }
}

/// Merges an inner split with the dims before it, and takes it apart again.
TEST(View, OfInnerSplitsAliasWithoutCommunication) {
  struct Merge {
    std::vector<int64_t> apart, together;
    std::vector<Placements> splits;
  };
  const auto n = world_size();
  std::vector<std::pair<DeviceMesh, std::vector<Merge>>> meshes{
      {line_mesh(),
       {{{2, 2 * n, 3}, {4 * n, 3}, {{Shard{1}}}},
        {{2, 2 * n, 3}, {12 * n}, {{Shard{1}}}},
        {{3, 3 * n - 1, 2}, {9 * n - 3, 2}, {{Shard{1}}}}, // of uneven parts
        {{2, 3, 3 * n - 1}, {2, 9 * n - 3}, {{Shard{2}}}},
        {{2, 3, 1, 2 * n}, {3 * 4 * n}, {{Shard{3}}}}}}};
  if (n == 4) {
    const std::vector<Placements> splits{
        {Shard{0}, Shard{1}}, {Shard{1}, Shard{0}}, {Shard{1}, Shard{1}}, {Replicate{}, Shard{1}}};
    meshes.push_back({init_device_mesh(test_device_type(), {2, 2}), {{{4, 8, 3}, {32, 3}, splits}}});
  }
  for (const auto& [mesh, merges] : meshes) {
    for (const auto& merge : merges) {
      const auto plain = torch::arange(c10::multiply_integers(merge.apart), torch::kFloat).view(merge.apart);
      for (const auto& split : merge.splits) {
        SCOPED_TRACE(::testing::Message() << split << " of " << c10::IntArrayRef(merge.apart));
        const auto base = make(plain, mesh, split);
        const CountCollectives counted;
        const auto merged = base.view(merge.together), again = merged.view(merge.apart);
        EXPECT_EQ(counted.total_bytes(), 0) << counted.to_string() << ", merged is " << DTensor(merged).placements();
        EXPECT_FALSE(is_copy(merged) || is_copy(again));
        EXPECT_EQ(DTensor(again).placements(), split);
        EXPECT_TENSORS_EQUAL(full(merged), plain.view(merge.together));
        merged.mul_(2);
        EXPECT_TENSORS_EQUAL(full(base), plain * 2);
        EXPECT_TENSORS_EQUAL(full(again), plain * 2);
      }
    }
  }
}

TEST(View, OfInnerSplitsThatDoNotMergeIsACopy) {
  const auto mesh = line_mesh();
  const auto plain = torch::arange(30, torch::kFloat).view({2, 5, 3}); // parts of 5 rows end inside a third of the merged dim
  const auto merged = make(plain, mesh, {Shard{1}}).view({30});
  EXPECT_TENSORS_EQUAL(full(merged), plain.view({30}));
  EXPECT_TENSORS_EQUAL(full(merged.view({2, 5, 3})), plain);
  EXPECT_EQ(is_copy(merged), mesh.size() > 1 && mesh.size() != 5);
}

/// The whole has none: its strides, and what is a view of it, must not depend on the size of a rank's part.
TEST(View, OfADimThatTwoMeshDimsSplitUnevenly) {
  const auto mesh = init_device_mesh(test_device_type(), {world_size(), 1, 1}, {"a", "b", "c"});
  const auto whole = torch::arange(30, torch::kFloat).view({5, 2, 3});
  for (const auto& last : {Placement(Shard{0}), Placement(Shard{1}), Placement(Shard{2}), Placement(StridedShard{2, 3})}) {
    const auto tensor = make(whole, mesh, {Shard{0}, Shard{0}, last});
    EXPECT_TENSORS_EQUAL(full(tensor.flatten()), whole.flatten()) << to_string(last);
    EXPECT_TENSORS_EQUAL(full(tensor.flatten(0, 1)), whole.flatten(0, 1)) << to_string(last);
  }
}

TEST(View, OfPartsWithGaps) {
  for (const Placement& placement : {Placement(Replicate{}), Placement(Shard{0}), Placement(Shard{1}), Placement(Partial{})}) {
    for (const auto& strided : with_gaps()) {
      SCOPED_TRACE(::testing::Message() << strided.name << " " << placement);
      check_gaps(strided, placement);
    }
  }
}

TEST(View, WritesBesideGapsReachTheBaseOrAreRefused) {
  for (const Placement& placement : {Placement(Replicate{}), Placement(Shard{0}), Placement(Shard{1})}) {
    for (const auto& strided : with_gaps()) {
      SCOPED_TRACE(::testing::Message() << strided.name << " " << placement);
      if (!strided.overlaps) check_writes_beside_gaps(strided, placement);
    }
  }
}

/// Kernels choose strides by their part, of which an empty or single row says nothing.
TEST(View, OfResultsWhoseStridesNothingTells) {
  const auto mesh = line_mesh();
  const auto whole = torch::arange(80, torch::kFloat).view({2, 8, 5});
  for (const auto& placement : whole_placements({2, 5, 8}, mesh.size())) {
    SCOPED_TRACE(to_string(placement));
    const Tensor x = make(whole.transpose(1, 2), mesh, {placement}), y = (x + x).flip(2);
    EXPECT_TENSORS_EQUAL(full(y.flatten(1)), (2 * whole.transpose(1, 2)).flip(2).flatten(1));
  }
}

TEST(View, OfWhatIsTransposedHasAGradientThroughItsPart) {
  const auto mesh = line_mesh();
  for (const auto& placement : whole_placements({8, 3}, mesh.size())) {
    SCOPED_TRACE(to_string(placement));
    const auto x = Tensor(make(torch::ones({8, 3}), mesh, {placement})).requires_grad_();
    const auto t = x.view({8, 3}).t();
    to_local(t).sum().backward();
    EXPECT_TENSORS_EQUAL(full(x.grad()), torch::ones({8, 3}));
  }
}

/// The ranks without it hold the lowest value of the dtype, where one is known.
TEST(View, AnElementOfUnsignedNumbers) {
  const auto mesh = line_mesh();
  for (const auto dtype : {at::kByte, at::kUInt16, at::kUInt32, at::kUInt64}) {
    const auto whole = torch::arange(6).to(dtype);
    for (const Placement& placement : {Placement(Replicate{}), Placement(Shard{0}), ragged_shards({6}, mesh.size()).back()}) {
      SCOPED_TRACE(::testing::Message() << dtype << " " << placement);
      EXPECT_TENSORS_EQUAL(full(make(whole, mesh, {placement}).select(0, 4)).to(torch::kLong), torch::tensor(4));
    }
  }
}

TEST(View, AutogradOfWritesIntoViews) {
  const auto mesh = line_mesh();
  for (const auto& placement : whole_placements({6, 4}, mesh.size())) {
    for (const auto& view : views()) {
      SCOPED_TRACE(view.name + " of " + to_string(placement));
      if (view.name == "detach" || view.name == "chunk 0" || view.name == "split 1" || view.name == "unbind")
        continue; // no autograd there
      const auto run = [&](Tensor leaf) {
        leaf.set_requires_grad(true);
        auto base = leaf * 3;
        auto part = view.take(base);
        if (is_dtensor(part) && is_copy(part)) return Tensor();
        part.mul_(2);
        (base * base).sum().backward();
        return leaf.grad();
      };
      const auto actual = run(make(values(), mesh, {placement}));
      if (!actual.defined()) continue;
      EXPECT_TENSORS_CLOSE(full(actual), run(values()));
      EXPECT_EQ(DTensor(actual).placements(), Placements{placement});
    }
  }
}

TEST(View, ATurnedTensorIsANewOne) {
  const auto mesh = line_mesh();
  for (const auto& placement : whole_placements({6, 4}, mesh.size())) {
    for (const int64_t turns : {-1, 0, 1, 2, 7}) {
      for (const auto& dims : std::vector<std::vector<int64_t>>{{0, 1}, {-1, 0}}) {
        SCOPED_TRACE(to_string(placement) + " " + std::to_string(turns));
        auto tensor = make(values(), mesh, {placement}).set_requires_grad(true);
        const auto turned = tensor.rot90(turns, dims), expected = values().rot90(turns, dims);
        EXPECT_TENSORS_EQUAL(full(turned.detach()), expected);
        (turned * turned).sum().backward();
        EXPECT_TENSORS_EQUAL(full(tensor.grad()), values() * 2);
        const torch::NoGradGuard no_grad;
        turned.mul_(2);
        EXPECT_TENSORS_EQUAL(full(turned), expected * 2);
        EXPECT_TENSORS_EQUAL(full(tensor), values());
      }
    }
  }
  EXPECT_THROWS_WITH(make(values(), mesh, {Shard{0}}).rot90(1, {0}), "aten::rot90: expected total rotation dims == 2");
  EXPECT_THROWS_WITH(make(values(), mesh, {Shard{0}}).rot90(1, {0, -2}), "aten::rot90: expected rotation dims to be different");
}

TEST(View, VersionsAndSavedTensors) {
  const auto mesh = line_mesh();
  const auto base = make(values(), mesh, {Shard{0}});
  const auto version = base._version();
  base.view({-1}).add_(1);
  EXPECT_EQ(base._version(), version + 1);
  base.detach().add_(1);
  EXPECT_EQ(base._version(), version + 2);
  auto leaf = make(values(), mesh, {Shard{0}}).set_requires_grad(true);
  auto result = leaf.exp();
  result.mul_(2);
  EXPECT_THROWS_WITH(result.sum().backward(), "modified by an inplace operation");
  EXPECT_THROWS_WITH(leaf.add_(1), "a leaf Variable that requires grad is being used in an in-place operation");
}

TEST(View, DataAndDetachShareTheMeta) {
  const auto mesh = line_mesh();
  auto leaf = make(values(), mesh, {Shard{0}}).set_requires_grad(true);
  leaf.data().mul_(2);
  EXPECT_TENSORS_EQUAL(full(leaf).detach(), values() * 2);
  EXPECT_EQ(internal::dtensor_meta(leaf.data()), internal::dtensor_meta(leaf));
  EXPECT_EQ(internal::dtensor_meta(leaf.detach()), internal::dtensor_meta(leaf));
  EXPECT_FALSE(leaf.detach().requires_grad());
}

TEST(View, InferenceMode) {
  const auto mesh = line_mesh();
  const auto base = make(values(), mesh, {Shard{0}});
  c10::InferenceMode inference;
  const auto part = base.view({2, 3, 4});
  EXPECT_FALSE(part.is_inference());
  part.mul_(2);
  EXPECT_TENSORS_EQUAL(full(base), values() * 2);
  const auto sum = (base + base).t();
  EXPECT_TRUE(sum.is_inference());
  EXPECT_TENSORS_EQUAL(full(sum), (values() * 4).t().contiguous());
  EXPECT_EQ(base.sum().item<float>(), values().sum().item<float>() * 2);
}

TEST(InPlace, KeepsThePlacement) {
  const auto mesh = line_mesh();
  torch::NoGradGuard no_grad;
  const auto other = values() + 1;
  const std::vector<std::function<void(const Tensor&, const Tensor&)>> ops{
      [](const Tensor& t, const Tensor& o) { t.add_(o, 2); },
      [](const Tensor& t, const Tensor& o) { t.mul_(o); },
      [](const Tensor& t, const Tensor& o) { t.addcdiv_(o, o + 1, 0.5); },
      [](const Tensor& t, const Tensor& o) { t.lerp_(o, 0.3); },
      [](const Tensor& t, const Tensor& o) { t.copy_(o); },
      [](const Tensor& t, const Tensor&) { t.zero_(); },
      [](const Tensor& t, const Tensor&) { t.fill_(3); },
      [](const Tensor& t, const Tensor&) { t.clamp_(2, 7); },
      [](const Tensor& t, const Tensor&) { t.sqrt_(); },
      [](const Tensor& t, const Tensor& o) { t.masked_fill_(o > 5, 0); },
      [](const Tensor& t, const Tensor& o) { torch::maximum_out(const_cast<Tensor&>(t), t, o); },
  };
  for (const auto& placement : whole_placements({6, 4}, mesh.size())) {
    for (const auto& from : whole_placements({6, 4}, mesh.size())) {
      for (size_t i = 0; i < ops.size(); ++i) {
        SCOPED_TRACE(std::to_string(i) + ": " + to_string(placement) + " with " + to_string(from));
        const auto plain = values();
        const auto base = make(plain, mesh, {placement});
        auto handle = base.unsafeGetTensorImpl();
        ops[i](plain, other);
        ops[i](base, make(other, mesh, {from}));
        EXPECT_EQ(base.unsafeGetTensorImpl(), handle);
        EXPECT_EQ(base.placements(), Placements{placement});
        EXPECT_TENSORS_CLOSE(base.full_tensor(), plain);
      }
    }
  }
}

TEST(InPlace, CopiesAPlainFullTensor) {
  const auto mesh = line_mesh();
  torch::NoGradGuard no_grad;
  for (const auto& placement : whole_placements({6, 4}, mesh.size())) {
    const auto base = make(torch::zeros({6, 4}), mesh, {placement});
    base.copy_(values());
    EXPECT_TENSORS_EQUAL(base.full_tensor(), values());
    base.copy_(values().to(torch::kLong) + 1);
    EXPECT_TENSORS_EQUAL(base.full_tensor(), values() + 1);
    EXPECT_THROWS_WITH(base.copy_(torch::zeros({7, 4})), "does not broadcast to the other arguments'");
  }
}

TEST(InPlace, AccumulatesGradientsInPlace) {
  const auto mesh = line_mesh();
  for (const auto& placement : whole_placements({6, 4}, mesh.size())) {
    auto leaf = make(values(), mesh, {placement}).set_requires_grad(true);
    for (int i = 0; i < 3; ++i) (leaf * leaf).sum().backward();
    EXPECT_TENSORS_CLOSE(full(leaf.grad()), values() * 6);
    EXPECT_EQ(DTensor(leaf.grad()).placements(), Placements{placement});
  }
}

TEST(View, InPlaceVariantsChangeTheTensorsOwnShape) {
  const auto mesh = line_mesh();
  const std::vector<std::function<void(Tensor)>> changes{[](Tensor t) { t.unsqueeze_(1); }, [](Tensor t) { t.transpose_(0, 1); },
                                                         [](Tensor t) { t.t_(); },
                                                         [](Tensor t) { t.unsqueeze_(0).squeeze_(0).unsqueeze_(2).squeeze_(); }};
  for (const auto& placement : whole_placements({6, 4}, mesh.size())) {
    for (const auto& change : changes) {
      SCOPED_TRACE(to_string(placement));
      const auto plain = values();
      const auto sharded = make(plain, mesh, {placement});
      change(plain);
      try {
        change(sharded);
      } catch (const c10::Error& error) { // a RaggedShard or StridedShard of these dims moves
        EXPECT_NE(std::string(error.what()).find("the data would have to move between ranks"), std::string::npos) << error.what();
        EXPECT_FALSE(is_replicate(placement) || std::holds_alternative<Shard>(placement));
        continue;
      }
      EXPECT_EQ(sharded.sizes(), plain.sizes());
      EXPECT_EQ(sharded.strides(), plain.strides());
      EXPECT_EQ(sharded._version(), plain._version());
      EXPECT_TENSORS_EQUAL(full(sharded), plain);
    }
  }
}

/// A view that moved says so to everything that reads it, not to operators alone.
TEST(View, OneThatMovedAndIsStaleCannotBeRead) {
  const auto mesh = line_mesh();
  if (mesh.size() == 1) GTEST_SKIP() << "nothing moves";
  const auto base = make(values(), mesh, {Shard{1}});
  const auto view = base.view({8, 3});
  const auto element = view.select(0, 0).select(0, 0);
  ASSERT_TRUE(is_copy(view));
  EXPECT_TENSORS_EQUAL(full(view), values().view({8, 3}));
  base.mul_(2);
  const auto* stale = "the DTensor behind this view was written after the view was taken";
  EXPECT_THROWS_WITH(full(view), stale);
  EXPECT_THROWS_WITH(full(view.detach()), stale);
  const Placements other{is_replicate(DTensor(view).placements()[0]) ? Placement(Shard{0}) : Replicate{}};
  EXPECT_THROWS_WITH(DTensor(view).redistribute(other), stale);
  EXPECT_THROWS_WITH(DTensor(view).redistribute_async(other), stale);
  EXPECT_THROWS_WITH(to_local(view), stale);
  EXPECT_THROWS_WITH(view.equal(view), stale);
  EXPECT_THROWS_WITH(element.item(), stale);
}

TEST(View, OneThatMovedIsNotWrittenInInferenceMode) {
  const auto mesh = line_mesh();
  if (mesh.size() == 1) GTEST_SKIP() << "nothing moves";
  const c10::InferenceMode inference;
  const auto base = make(values(), mesh, {Shard{1}});
  const auto* copy = "this view of a DTensor could not alias it";
  EXPECT_THROWS_WITH(base.view({8, 3}).mul_(3), copy);
  EXPECT_THROWS_WITH(base.flatten().slice(0, 1, 7).fill_(9), copy);
  EXPECT_TENSORS_EQUAL(full(base), values());
  base.t().mul_(2);
  EXPECT_TENSORS_EQUAL(full(base), values() * 2);
}

} // namespace
} // namespace tessera::testing::view_test
