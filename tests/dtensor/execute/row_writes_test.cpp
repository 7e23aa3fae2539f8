// Writes to tensors whose parts end inside a row, where the ragged layout cuts it. What is written changes as a plain tensor
// would, in the memory that it has and with the placements that it has.
#include <gtest/gtest.h>

#include <tessera/tests/dtensor/layouts.h>

namespace tessera::testing::row_writes_test {
namespace {

using at::Tensor;
using Sizes = std::vector<int64_t>;

Tensor numbers(const Sizes& sizes, at::ScalarType dtype, int64_t seed = 0) {
  const auto numel = std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
  return torch::arange(numel, torch::kDouble).mul(7).add(3 * seed).remainder(11).add(1).div(4).view(sizes).to(dtype);
}

/// Splits of dims 0..`dim` of `sizes`, alike, at odd places, with ranks that hold nothing or all.
std::vector<Placement> cuts(const Sizes& sizes, int64_t dim) {
  int64_t positions = 1;
  for (int64_t d = 0; d <= dim; ++d) positions *= sizes[d];
  const auto ranks = world_size();
  std::vector<Placement> result;
  const auto add = [&](const std::function<int64_t(int64_t rank)>& end) { // where a rank's part ends
    RaggedShard ragged{dim, {}};
    for (int64_t r = 0, begin = 0; r < ranks; ++r) {
      const auto next = r == ranks - 1 ? positions : std::clamp(end(r), begin, positions);
      ragged.extents.push_back(next - begin);
      begin = next;
    }
    result.emplace_back(ragged);
  };
  add([&](int64_t r) { return (r + 1) * ((positions + ranks - 1) / ranks); });
  add([&](int64_t r) { return r == 0 ? 0 : positions * r / ranks + 1; });
  add([&](int64_t r) { return r + 1; });
  add([&](int64_t r) { return r < ranks - 2 ? positions - 5 : positions; });
  return result;
}

/// `sizes` with 1 in some dims, and without its first ones: all that is broadcast to it.
std::vector<Sizes> broadcast_to(const Sizes& sizes) {
  std::vector<Sizes> result;
  for (uint64_t ones = 0; ones < uint64_t{1} << sizes.size(); ++ones) {
    auto part = sizes;
    for (size_t d = 0; d < sizes.size(); ++d) {
      if ((ones >> d & 1) != 0) part[d] = 1;
    }
    result.push_back(part);
  }
  for (size_t d = 1; d <= sizes.size(); ++d) result.emplace_back(sizes.begin() + static_cast<int64_t>(d), sizes.end());
  return result;
}

/// Changes `w` by `x` and `y`, which are broadcast to it.
struct Edit {
  const char* name;
  std::function<void(Tensor& w, const Tensor& x, const Tensor& y)> run;
};

std::vector<Edit> arithmetic() {
  return {
      {"add_", [](Tensor& w, const Tensor& x, const Tensor&) { w.add_(x, 2); }},
      {"sub_", [](Tensor& w, const Tensor& x, const Tensor&) { w.sub_(x); }},
      {"mul_", [](Tensor& w, const Tensor& x, const Tensor&) { w.mul_(x); }},
      {"div_", [](Tensor& w, const Tensor& x, const Tensor&) { w.div_(x); }},
      {"div_ floor", [](Tensor& w, const Tensor& x, const Tensor&) { w.div_(x, "floor"); }},
      {"floor_divide_", [](Tensor& w, const Tensor& x, const Tensor&) { w.floor_divide_(x); }},
      {"pow_", [](Tensor& w, const Tensor& x, const Tensor&) { w.pow_(x); }},
      {"fmod_", [](Tensor& w, const Tensor& x, const Tensor&) { w.fmod_(x); }},
      {"remainder_", [](Tensor& w, const Tensor& x, const Tensor&) { w.remainder_(x); }},
      {"atan2_", [](Tensor& w, const Tensor& x, const Tensor&) { w.atan2_(x); }},
      {"hypot_", [](Tensor& w, const Tensor& x, const Tensor&) { w.hypot_(x); }},
      {"copysign_", [](Tensor& w, const Tensor& x, const Tensor&) { w.copysign_(x - 1.5); }},
      {"nextafter_", [](Tensor& w, const Tensor& x, const Tensor&) { w.nextafter_(x); }},
      {"heaviside_", [](Tensor& w, const Tensor& x, const Tensor&) { w.sub_(1).heaviside_(x); }},
      {"xlogy_", [](Tensor& w, const Tensor& x, const Tensor&) { w.xlogy_(x); }},
      {"ldexp_", [](Tensor& w, const Tensor& x, const Tensor&) { w.ldexp_(x); }},
      {"lerp_ by a number", [](Tensor& w, const Tensor& x, const Tensor&) { w.lerp_(x.expand(w.sizes()), 0.3); }},
      {"lerp_", [](Tensor& w, const Tensor& x, const Tensor& y) { w.lerp_(x, y); }},
      {"addcmul_", [](Tensor& w, const Tensor& x, const Tensor& y) { w.addcmul_(x, y, 0.5); }},
      {"addcdiv_", [](Tensor& w, const Tensor& x, const Tensor& y) { w.addcdiv_(x, y, 0.5); }},
      {"copy_", [](Tensor& w, const Tensor& x, const Tensor&) { w.copy_(x); }},
      {"a list",
       [](Tensor& w, const Tensor& x, const Tensor& y) {
         torch::_foreach_mul_({w, w}, {x, y});
       }},
  };
}

std::vector<Edit> choices() {
  return {
      {"clamp_", [](Tensor& w, const Tensor& x, const Tensor& y) { w.clamp_(x, y); }},
      {"clamp_min_", [](Tensor& w, const Tensor& x, const Tensor&) { w.clamp_min_(x); }},
      {"clamp_max_", [](Tensor& w, const Tensor& x, const Tensor&) { w.clamp_max_(x); }},
      {"masked_fill_", [](Tensor& w, const Tensor& x, const Tensor&) { w.masked_fill_(x > 1.4, 0.5); }},
      {"masked_fill_ with a tensor", [](Tensor& w, const Tensor& x, const Tensor& y) { w.masked_fill_(x > 1.4, y.max()); }},
      {"masked_scatter_", [](Tensor& w, const Tensor& x, const Tensor&) { w.masked_scatter_(x > 1.4, w * 2); }},
      {"index_put_ of a mask", [](Tensor& w, const Tensor& x, const Tensor& y) { w.index_put_({(w + x) > 2.4}, y.max()); }},
      {"lt_", [](Tensor& w, const Tensor& x, const Tensor&) { w.lt_(x); }},
      {"le_", [](Tensor& w, const Tensor& x, const Tensor&) { w.le_(x); }},
      {"gt_", [](Tensor& w, const Tensor& x, const Tensor&) { w.gt_(x); }},
      {"ge_", [](Tensor& w, const Tensor& x, const Tensor&) { w.ge_(x); }},
      {"eq_", [](Tensor& w, const Tensor& x, const Tensor&) { w.eq_(x); }},
      {"ne_", [](Tensor& w, const Tensor& x, const Tensor&) { w.ne_(x); }},
      {"logical_and_", [](Tensor& w, const Tensor& x, const Tensor&) { w.logical_and_(x - 1); }},
      {"logical_or_", [](Tensor& w, const Tensor& x, const Tensor&) { w.sub_(1).logical_or_(x - 1); }},
      {"logical_xor_", [](Tensor& w, const Tensor& x, const Tensor&) { w.logical_xor_(x - 1); }},
  };
}

/// Of operators that read no other tensor than `w`, or index it.
std::vector<Edit> others() {
  using T = const Tensor&;
  const auto last = [](T w, int64_t dim) { return w.new_full({1}, w.size(dim) - 1, torch::kLong); };
  return {
      {"sigmoid_", [](Tensor& w, T, T) { w.sigmoid_(); }},
      {"logical_not_", [](Tensor& w, T, T) { w.logical_not_(); }},
      {"fill_", [](Tensor& w, T x, T) { w.fill_(x.max()); }},
      {"renorm_ of rows", [](Tensor& w, T, T) { w.renorm_(2, 0, 1.5); }},
      {"renorm_ of columns", [](Tensor& w, T, T) { w.renorm_(1, -1, 2); }},
      {"renorm_ by the largest", [](Tensor& w, T, T) { w.renorm_(INFINITY, 1, 2); }},
      {"cumsum_", [](Tensor& w, T, T) { w.cumsum_(0); }},
      {"cumsum_ of a row", [](Tensor& w, T, T) { w.cumsum_(-1); }},
      {"cumprod_", [](Tensor& w, T, T) { w.cumprod_(1); }},
      {"tril_", [](Tensor& w, T, T) { w.tril_(); }},
      {"triu_", [](Tensor& w, T, T) { w.triu_(1); }},
      {"index_fill_", [last](Tensor& w, T, T) { w.index_fill_(1, last(w, 1), 0.5); }},
      {"index_add_", [last](Tensor& w, T, T) { w.index_add_(1, last(w, 1), w.narrow(1, 0, 1) * 2); }},
      {"index_copy_", [last](Tensor& w, T, T) { w.index_copy_(0, last(w, 0), w.narrow(0, 0, 1) * 2); }},
      {"scatter_", [](Tensor& w, T, T) { w.scatter_(1, torch::zeros_like(w, torch::kLong), w * 2); }},
      {"scatter_add_", [](Tensor& w, T, T) { w.scatter_add_(0, torch::full_like(w, w.size(0) - 1, torch::kLong), w * 2); }},
      {"put_", [](Tensor& w, T, T) { w.put_(w.new_ones({1}, torch::kLong), w.new_full({1}, 7)); }},
      {"its own row", [](Tensor& w, T, T) { w.sub_(w.mean(-1, true)); }},
      {"its own column", [](Tensor& w, T, T) { w.mul_(w.sum(0, true)); }},
  };
}

struct Case {
  Sizes sizes, x, y;
  at::ScalarType dtype;
  Placement cut;
  size_t edit;
};

std::vector<Edit> all_edits() {
  auto edits = arithmetic();
  for (const auto& part : {choices(), others()}) edits.insert(edits.end(), part.begin(), part.end());
  return edits;
}

std::vector<Case> cases(const std::vector<Edit>& edits) {
  std::vector<Case> result;
  const auto alone = others().size();
  for (const Sizes& sizes : {Sizes{5, 3}, Sizes{3, 4, 2}, Sizes{1, 7}, Sizes{7, 1}, Sizes{2, 1, 3}}) {
    const auto operands = broadcast_to(sizes);
    for (int64_t dim = 0; dim < static_cast<int64_t>(sizes.size()); ++dim) {
      for (const auto& cut : cuts(sizes, dim)) {
        for (size_t e = 0; e < edits.size(); ++e) {
          const auto count = e + alone < edits.size() ? operands.size() : 1;
          for (size_t i = 0; i < count; ++i) {
            for (const auto dtype : {torch::kFloat, torch::kBFloat16})
              result.push_back({sizes, operands[i], operands[(i * 3 + e) % operands.size()], dtype, cut, e});
          }
        }
      }
    }
  }
  return result;
}

/// Placements of an operand, another one for each case.
Placement placement_of(const Sizes& sizes, int64_t ranks, size_t number) {
  const auto all = whole_placements(sizes, ranks);
  return number % (all.size() + 1) == all.size() ? Placement(Partial{}) : all[number % (all.size() + 1)];
}

std::string text_of(const Case& c, const Edit& edit) {
  return c10::str(edit.name, " of ", c.dtype, c10::IntArrayRef(c.sizes), " (", to_string(c.cut), ") by ", c10::IntArrayRef(c.x),
                  " and ", c10::IntArrayRef(c.y));
}

/// Runs `edit` on a plain tensor and on one that lies as `placements` on `mesh`.
void expect_as_plain(const Edit& edit, const Case& c, const DeviceMesh& mesh, const Placements& placements, size_t number) {
  SCOPED_TRACE(text_of(c, edit) + " as " + to_string(placements));
  auto expected = numbers(c.sizes, c.dtype);
  const auto x = numbers(c.x, c.dtype, 1), y = numbers(c.y, c.dtype, 2);
  edit.run(expected, x, y);
  Tensor w = make(numbers(c.sizes, c.dtype), mesh, placements);
  const auto& meta = *internal::dtensor_meta(w);
  const void* const memory = meta.local.const_data_ptr();
  auto replicated = Placements(mesh.ndim());
  auto of_x = replicated, of_y = replicated;
  of_x[0] = placement_of(c.x, mesh.size(0), number);
  of_y[0] = placement_of(c.y, mesh.size(0), number / 3);
  const auto error = error_of([&] { edit.run(w, make(x, mesh, of_x), make(y, mesh, of_y)); });
  ASSERT_EQ(error, "no error");
  const double tolerance = c.dtype == torch::kFloat ? 1e-5 : 2e-2;
  EXPECT_TENSORS_CLOSE(whole_of(w), expected, tolerance, tolerance);
  EXPECT_EQ(DTensor(w).placements(), placements);
  EXPECT_EQ(meta.local.const_data_ptr(), memory);
}

TEST(RowWrites, EveryOperatorChangesThePartsAsAPlainTensor) {
  const auto mesh = line_mesh();
  const auto edits = all_edits();
  size_t number = 0;
  for (const auto& c : sweep(cases(edits), 1500)) expect_as_plain(edits[c.edit], c, mesh, {c.cut}, number++);
}

TEST(RowWrites, OnTwoMeshDimsToo) {
  if (world_size() != 4) GTEST_SKIP() << "one mesh dim has all ranks";
  const auto mesh = init_device_mesh(test_device_type(), {2, 2}, {"outer", "inner"});
  const auto edits = all_edits();
  const Sizes sizes{3, 4, 2};
  size_t number = 0;
  for (const auto& cut :
       {Placement(RaggedShard{1, {5, 7}}), Placement(RaggedShard{1, {0, 12}}), Placement(RaggedShard{0, {1, 2}})}) {
    for (const auto& other : {Placement(Replicate{}), Placement(Shard{2})}) {
      for (const auto& x : broadcast_to(sizes)) {
        for (size_t e = 0; e < edits.size(); e += 1 + number % 3) {
          const Case c{sizes, x, x, torch::kFloat, cut, e};
          expect_as_plain(edits[e], c, mesh, number % 2 == 0 ? Placements{cut, other} : Placements{other, cut}, number);
          ++number;
        }
      }
    }
  }
}

TEST(RowWrites, ByPlainTensors) {
  const auto mesh = line_mesh();
  const ImplicitReplication replication;
  for (const Sizes& sizes : {Sizes{5, 3}, Sizes{3, 4, 2}}) {
    for (const auto& x : broadcast_to(sizes)) {
      for (const auto& cut : cuts(sizes, 1)) {
        for (const auto& edit : arithmetic()) {
          SCOPED_TRACE(c10::str(edit.name, " by ", c10::IntArrayRef(x), " of ", to_string(cut)));
          auto expected = numbers(sizes, torch::kFloat);
          const auto by = numbers(x, torch::kFloat, 1);
          edit.run(expected, by, by);
          Tensor w = make(numbers(sizes, torch::kFloat), mesh, {cut});
          edit.run(w, by.to(mesh.device()), by.to(mesh.device()));
          EXPECT_TENSORS_CLOSE(whole_of(w), expected);
        }
      }
    }
  }
}

TEST(RowWrites, ReachAllThatSharesTheMemory) {
  for (const auto& cut : cuts({5, 3}, 1)) {
    SCOPED_TRACE(to_string(cut));
    auto expected = numbers({5, 3}, torch::kFloat);
    Tensor w = make(expected, line_mesh(), {cut});
    auto alias = w.detach(), flat = w.view({-1});
    const auto part = to_local(w);
    w.sub_(w.mean(1, true));
    expected.sub_(expected.mean(1, true));
    flat.cumsum_(0);
    expected.view({-1}).cumsum_(0);
    alias.tril_();
    expected.tril_();
    for (const auto& tensor : {w, alias, flat}) EXPECT_TENSORS_CLOSE(whole_of(tensor).view({5, 3}), expected);
    EXPECT_TENSORS_CLOSE(part.cpu(), lay_out(expected, line_mesh(), {cut}).cpu());
  }
}

TEST(RowWrites, AreSeenByAutograd) {
  using Write = std::function<void(Tensor & weight)>;
  for (const auto& write : {Write([](Tensor& w) { w.mul_(w.sum(0, true)); }), Write([](Tensor& w) { w.cumsum_(1); })}) {
    auto weight = Tensor(make(numbers({5, 3}, torch::kDouble), line_mesh(), {cuts({5, 3}, 1)[0]})).requires_grad_();
    const auto loss = weight.square().sum();
    {
      const at::NoGradGuard no_grad;
      write(weight);
    }
    EXPECT_THROWS_WITH(loss.backward(), "modified by an inplace operation");
  }
}

/// A Partial is reduced to be written, and stays what it was for all that share its memory.
TEST(RowWrites, OfSumsAndNorms) {
  const auto mesh = line_mesh();
  const auto whole = numbers({5, 3}, torch::kFloat) - 1.5;
  const auto sum = [&] { return Tensor(make(whole, mesh, {Partial{}})); };
  auto alone = sum();
  alone.relu_();
  EXPECT_TENSORS_CLOSE(whole_of(alone), whole.relu());
  const auto shared = sum(), view = shared.view({-1});
  shared.relu_();
  EXPECT_TENSORS_CLOSE(whole_of(shared), whole.relu());
  EXPECT_TENSORS_CLOSE(whole_of(view), whole.relu().view({-1}));
  auto twice = sum();
  torch::_foreach_add_({twice, twice}, 1);
  EXPECT_TENSORS_CLOSE(whole_of(twice), whole + 2);
  torch::_foreach_mul_({twice, twice}, {twice, twice});
  EXPECT_TENSORS_CLOSE(whole_of(twice), (whole + 2).square().square());
  if (world_size() == 1) return;
  const auto norm = Tensor(make(torch::ones({5, 3}), mesh, {Shard{1}})).norm(2, 1, true), flat = norm.view({-1});
  EXPECT_THROWS_WITH(norm.sub_(7), "aten::sub_.Scalar: the written tensor, float[5, 1] (Partial(norm 2)) on");
}

} // namespace
} // namespace tessera::testing::row_writes_test
