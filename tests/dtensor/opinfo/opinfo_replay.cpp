#include "opinfo_replay.h"

#include <absl/strings/str_split.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <set>
#include <string_view>

#include <tessera/tests/dtensor/layouts.h>

namespace tessera::testing {

using at::Tensor;

namespace {

bool written(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

} // namespace

Tensor placed_as(const Tensor& whole, const DTensor& output) {
  return make(whole, output.mesh(), replicate_partial(output.placements()));
}

OpStage plain_stage() {
  return {[](const Tensor& tensor, size_t) { return tensor.detach().clone(); }};
}

OpResult run_call(const OpCall& call, const OpStage& stage) {
  OpResult result;
  std::vector<Tensor> leaves;
  std::vector<bool> is_written;
  for (size_t i = 0; i < call.arguments.size(); ++i) {
    is_written.resize(is_written.size() + tensors_of({call.arguments[i]}).size(), written(call.op.schema().arguments()[i]));
  }
  size_t index = 0;
  auto stack = with_tensors(call.arguments, [&](const Tensor& tensor) {
    const size_t i = index++;
    result.narrow |= at::isFloatingType(tensor.scalar_type()) && tensor.scalar_type() != at::kDouble;
    auto leaf = stage.place(tensor, i);
    if (tensor.requires_grad()) leaves.push_back(leaf.set_requires_grad(true));
    auto argument = is_written[i] && tensor.requires_grad() ? leaf.clone() : leaf;
    if (is_written[i]) result.written.push_back(argument);
    return argument;
  });
  torch::manual_seed(3);
  {
    at::AutoGradMode mode(!leaves.empty());
    call.op.callBoxed(stack);
  }
  result.outputs = tensors_of(stack);
  for (const auto& output : result.outputs) {
    TORCH_CHECK(!output.defined() || output.layout() == at::kStrided, "a DTensor has no layout but strided");
  }
  stage.between();
  std::vector<Tensor> roots, cotangents;
  for (const auto& output : result.outputs) {
    if (!output.requires_grad()) continue;
    roots.push_back(output);
    torch::manual_seed(5);
    const auto whole = torch::randn(output.sizes(), at::TensorOptions().dtype(output.dtype()));
    cotangents.push_back(is_dtensor(output) ? stage.place_gradient(whole, DTensor(output)) : whole);
  }
  if (!roots.empty() && !leaves.empty()) {
    result.gradients = torch::autograd::grad(roots, leaves, cotangents, std::nullopt, false, true);
  }
  stage.between();
  return result;
}

namespace {

/// The relative and the absolute tolerance of a result. Parts of a Partial in a type narrower than float were each rounded, and
/// so is their sum: half a unit of parts that add up to at most 2 x + 1, and of the sum.
std::pair<double, double> tolerance(at::ScalarType type, bool partial, bool narrow) {
  if (partial && at::isReducedFloatingType(type)) {
    const double unit =
        type == torch::kBFloat16 ? std::numeric_limits<c10::BFloat16>::epsilon() : std::numeric_limits<c10::Half>::epsilon();
    return {unit, unit};
  }
  return type == torch::kDouble && !narrow ? std::pair{1e-7, 1e-8} : std::pair{1e-4, 1e-5};
}

std::string compare(const Tensor& actual, const Tensor& expected, const char* what, bool narrow) {
  if (actual.defined() != expected.defined()) {
    // No gradient is a gradient of zeros.
    const auto& some = actual.defined() ? actual : expected;
    const auto whole = is_dtensor(some) ? DTensor(some).full_tensor() : some;
    return whole.count_nonzero().item<int64_t>() == 0 ? "" : fmt::format("{}: one is undefined", what);
  }
  if (!actual.defined()) return "";
  if (actual.sizes() != expected.sizes())
    return fmt::format("{}: sizes {} not {}", what, c10::str(actual.sizes()), c10::str(expected.sizes()));
  if (actual.dtype() != expected.dtype())
    return fmt::format("{}: dtype {} not {}", what, c10::str(actual.dtype()), c10::str(expected.dtype()));
  if (!is_dtensor(actual)) {
    // linspace and the like read the values of their arguments and give a plain tensor; what is written or a gradient never is.
    const bool may_be_plain = std::string_view(what) == "output";
    if (may_be_plain && tensors_close(actual, expected, 1e-4, 1e-5)) return "";
    return fmt::format("{}: the result is no DTensor", what);
  }
  const DTensor tensor(actual);
  const auto plain = expected.detach().resolve_conj().resolve_neg();
  const bool partial = tensor.spec().has_partial();
  auto mine = partial ? DTensor(tensor.detach()).full_tensor() : tensor.local();
  auto theirs = partial ? plain : lay_out(plain, tensor.mesh(), tensor.placements());
  mine = mine.resolve_conj().resolve_neg();
  if (mine.is_complex()) {
    mine = torch::view_as_real(mine.contiguous());
    theirs = torch::view_as_real(theirs.contiguous());
  }
  const auto [relative, absolute] = tolerance(mine.scalar_type(), partial, narrow);
  const auto verdict = tensors_close(mine, theirs, relative, absolute);
  return verdict ? "" : fmt::format("{}: {}", what, verdict.message());
}

std::string compare_all(const std::vector<Tensor>& actual, const std::vector<Tensor>& expected, const char* what, bool narrow) {
  if (actual.size() != expected.size()) return fmt::format("{}: {} tensors, not {}", what, actual.size(), expected.size());
  std::string text;
  for (size_t i = 0; i < actual.size(); ++i) {
    auto part = compare(actual[i], expected[i], what, narrow); // every rank compares all: some compare with a collective
    if (text.empty()) text = std::move(part);
  }
  return text;
}

} // namespace

std::string difference(const OpResult& actual, const OpResult& expected, bool outputs_too) {
  // Every rank compares all: some compare with a collective.
  auto text = outputs_too ? compare_all(actual.outputs, expected.outputs, "output", expected.narrow) : "";
  for (const auto& other : {compare_all(actual.written, expected.written, "written argument", expected.narrow),
                            compare_all(actual.gradients, expected.gradients, "gradient", expected.narrow)}) {
    if (text.empty()) text = other;
  }
  return text;
}

std::string name_of(const c10::OperatorHandle& op) { return c10::toString(op.operator_name()); }

std::string describe(const OpCall& call, const std::vector<Placements>& placements) {
  std::string text = name_of(call.op) + "(";
  const auto tensors = tensors_of(call.arguments);
  for (size_t i = 0; i < tensors.size() && i < 6; ++i)
    text += fmt::format("{} {}, ", c10::str(tensors[i].sizes()), to_string(placements[i]));
  for (const auto& value : call.arguments) {
    if (!value.isTensor() && !value.isTensorList() && !value.isNone()) text += c10::str(value) + ", ";
  }
  return text + ")";
}

namespace {

struct Pair {
  size_t i, a, j, b;
};

/// Every pair of options of two lists.
std::vector<Pair> all_pairs(const std::vector<size_t>& counts) {
  std::vector<Pair> pairs;
  for (size_t j = 0; j < counts.size(); ++j) {
    for (size_t i = 0; i < j; ++i) {
      for (size_t n = 0; n < counts[i] * counts[j]; ++n) pairs.push_back({i, n % counts[i], j, n / counts[i]});
    }
  }
  return pairs;
}

/// A random product that takes up as many of `pairs` as fit together, which are dropped.
std::vector<size_t> cover(const std::vector<size_t>& counts, std::vector<Pair>& pairs, std::mt19937& random) {
  std::vector<std::optional<size_t>> picked(counts.size());
  std::erase_if(pairs, [&](const Pair& pair) {
    if (picked[pair.i].value_or(pair.a) != pair.a || picked[pair.j].value_or(pair.b) != pair.b) return false;
    picked[pair.i] = pair.a;
    picked[pair.j] = pair.b;
    return true;
  });
  std::vector<size_t> product;
  for (size_t i = 0; i < counts.size(); ++i) product.push_back(picked[i] ? *picked[i] : random() % counts[i]);
  return product;
}

} // namespace

std::vector<std::vector<size_t>> pick_products(const std::vector<size_t>& counts, size_t limit, std::mt19937& random) {
  double total = 1;
  for (const auto count : counts) total *= static_cast<double>(count);
  std::vector<std::vector<size_t>> result;
  if (total <= static_cast<double>(limit)) {
    for (size_t n = 0; n < static_cast<size_t>(total); ++n) {
      std::vector<size_t> product;
      size_t rest = n;
      for (const auto count : counts) {
        product.push_back(rest % count);
        rest /= count;
      }
      result.push_back(std::move(product));
    }
    return result;
  }
  auto pairs = all_pairs(counts);
  std::shuffle(pairs.begin(), pairs.end(), random);
  while (result.size() < limit) result.push_back(cover(counts, pairs, random));
  return result;
}

std::vector<std::filesystem::path> opinfo_files() {
  const char* folder = std::getenv("TESSERA_OPINFO_CALLS");
  if (!folder) return {};
  const char* only = std::getenv("TESSERA_OPINFO_ONLY");
  using Names = std::set<std::string>;
  const Names wanted = only ? Names(absl::StrSplit(only, ',')) : Names();
  std::vector<std::filesystem::path> result;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const auto& path = entry.path();
    if (path.extension() == ".pt" && (!only || wanted.count(path.stem()))) result.push_back(path);
  }
  std::sort(result.begin(), result.end());
  return result;
}

} // namespace tessera::testing
