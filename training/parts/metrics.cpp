#include <tessera/training/metrics.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <limits>
#include <utility>

#include <tessera/base/listing.h>
#include <tessera/collectives/calls/signature.h>
#include <tessera/collectives/process_context.h>
#include <tessera/collectives/ranks/gather_texts.h>
#include <tessera/dtensor/api.h>

namespace tessera {

namespace {

constexpr const char* kLabel = "metrics";

/// An error on every rank unless all of them ask for the same.
void check_agreed(const std::string& request, Communicator& communicator, const DeviceMesh& mesh) {
  const auto requests = internal::gather_texts_that_differ(request, communicator, mesh.device(), kLabel);
  if (requests.empty()) return;
  std::vector<std::string> lines;
  for (size_t i = 0; i < requests.size(); ++i) lines.push_back(fmt::format("rank {}: {}", mesh.ranks()[i], requests[i]));
  TORCH_CHECK_VALUE(false, "all_reduce: the ranks of ", mesh.to_string(),
                    " ask for different reductions:", internal::listing(lines));
}

/// What is wrong with `tensor` on this rank alone; "" for nothing.
std::string problem_of(const at::Tensor& tensor, ReduceOp op) {
  if (!tensor.defined()) return "an undefined tensor";
  if (is_dtensor(tensor)) return "a DTensor, which is global already: take its full_tensor()";
  if (tensor.layout() != at::kStrided) return "a tensor that is not dense";
  if (tensor.is_complex() || tensor.is_quantized()) return fmt::format("a tensor of {}", c10::toString(tensor.scalar_type()));
  if (op == ReduceOp::kAvg && !tensor.is_floating_point())
    return fmt::format("the mean of {}: take the sum, or a floating-point tensor", c10::toString(tensor.scalar_type()));
  return "";
}

/// No two lists of names give the same text.
std::string listed(const std::vector<std::string>& names) {
  std::vector<std::string> quoted;
  for (const auto& name : names) quoted.push_back(c10::str(std::quoted(name)));
  return fmt::format("{}", fmt::join(quoted, ", "));
}

/// `problem` is this rank's own. `request` says what all must ask for alike.
at::Tensor reduce(const at::Tensor& tensor, const DeviceMesh& mesh, ReduceOp op, const std::string& problem,
                  const std::string& request) {
  TORCH_CHECK_VALUE(mesh.coordinate(), "all_reduce: rank ", process_context().rank(), " is not in ", mesh.to_string());
  const at::NoGradGuard no_grad;
  const auto communicator = process_context().communicator(mesh.rank_list(), mesh.device_type(), kLabel);
  check_agreed(request, *communicator, mesh);
  TORCH_CHECK_VALUE(problem.empty(), "all_reduce: every rank gave ", problem);
  const auto dtype = tensor.scalar_type();
  const bool widens = op == ReduceOp::kAvg && !communicator->averages(dtype); // else small numbers become 0
  auto result = tensor.detach().to(mesh.device(), widens ? at::kFloat : dtype).clone(at::MemoryFormat::Contiguous);
  if (result.numel() > 0) communicator->all_reduce(result.view({-1}), op, kLabel).wait();
  return result.to(dtype);
}

std::map<std::string, double> values_of(const std::vector<std::string>& names, const at::Tensor& values) {
  std::map<std::string, double> result;
  const auto host = values.cpu();
  for (size_t i = 0; i < names.size(); ++i) result[names[i]] = host.const_data_ptr<double>()[i];
  return result;
}

std::vector<std::string> names_of(const std::map<std::string, double>& values) {
  std::vector<std::string> names;
  for (const auto& [name, value] : values) names.push_back(name);
  return names;
}

} // namespace

at::Tensor all_reduce(const at::Tensor& tensor, const DeviceMesh& mesh, ReduceOp op) {
  const auto problem = problem_of(tensor, op);
  const auto request = !problem.empty() ? problem
                                        : fmt::format("the {} of {} [{}]", internal::to_string(op),
                                                      c10::toString(tensor.scalar_type()), fmt::join(tensor.sizes(), ", "));
  return reduce(tensor, mesh, op, problem, request);
}

std::map<std::string, double> all_reduce(const std::map<std::string, double>& values, const DeviceMesh& mesh, ReduceOp op) {
  const auto names = names_of(values);
  auto numbers = at::empty({static_cast<int64_t>(names.size())}, at::kDouble);
  std::transform(values.begin(), values.end(), numbers.mutable_data_ptr<double>(), [](const auto& each) { return each.second; });
  const auto request = fmt::format("the {} of numbers named {}", internal::to_string(op), listed(names));
  return values_of(names, reduce(numbers, mesh, op, "", request));
}

RunningMeans::RunningMeans(std::vector<std::string> names) {
  TORCH_CHECK_VALUE(!names.empty(), "RunningMeans: no names are given");
  for (auto& name : names) {
    TORCH_CHECK_VALUE(sums_.count(name) == 0, "RunningMeans: the name \"", name, "\" appears twice");
    sums_.emplace(std::move(name), Sum{});
  }
}

RunningMeans::Sum& RunningMeans::sum_of(const std::string& name) {
  const auto found = sums_.find(name);
  TORCH_CHECK_VALUE(found != sums_.end(), "RunningMeans: \"", name,
                    "\" is none of the names that it was made with: ", fmt::format("{}", fmt::join(names_of(counts()), ", ")));
  return found->second;
}

void RunningMeans::add(const std::string& name, double value, double weight) {
  auto& sum = sum_of(name);
  TORCH_CHECK_VALUE(weight >= 0 && std::isfinite(weight), "RunningMeans: \"", name, "\" has the weight ", weight,
                    ", which must be finite and not negative");
  if (weight == 0) return; // of a batch without rows, whose mean is NaN
  sum.total += value * weight;
  sum.weight += weight;
}

void RunningMeans::add(const std::string& name, const at::Tensor& values) {
  auto& sum = sum_of(name);
  const auto problem = problem_of(values, ReduceOp::kSum);
  TORCH_CHECK_VALUE(problem.empty(), "RunningMeans: \"", name, "\" is ", problem);
  sum.total += values.detach().sum(at::kDouble).item<double>();
  sum.weight += static_cast<double>(values.numel());
}

void RunningMeans::add_accuracy(const std::string& name, const at::Tensor& scores, const at::Tensor& targets, int64_t k,
                                int64_t ignored) {
  auto& sum = sum_of(name);
  for (const auto& each : {scores, targets}) {
    const auto problem = problem_of(each, ReduceOp::kSum);
    TORCH_CHECK_VALUE(problem.empty(), "RunningMeans: \"", name, "\" is the accuracy of ", problem);
  }
  TORCH_CHECK_VALUE(scores.dim() > 0 && scores.sizes().slice(0, static_cast<size_t>(scores.dim() - 1)) == targets.sizes(),
                    "RunningMeans: \"", name, "\": scores of shape ", scores.sizes(), " need targets of one dim less, not ",
                    targets.sizes());
  TORCH_CHECK_VALUE(at::isIntegralType(targets.scalar_type(), /*includeBool=*/false), "RunningMeans: \"", name,
                    "\": targets are classes, not ", targets.scalar_type());
  TORCH_CHECK_VALUE(k >= 1 && k <= scores.size(-1), "RunningMeans: \"", name, "\": the best ", k, " of ", scores.size(-1),
                    " classes");
  const at::NoGradGuard no_grad;
  const auto counted = targets.to(at::kLong).ne(ignored); // which may be no number of the targets' dtype
  const auto best = k == 1 ? scores.argmax(-1, /*keepdim=*/true) : std::get<1>(scores.topk(k, -1));
  const auto hits = best.eq(targets.unsqueeze(-1)).any(-1).logical_and(counted);
  sum.total += hits.sum().item<double>();
  sum.weight += counted.sum().item<double>();
}

std::map<std::string, double> RunningMeans::means() const {
  std::map<std::string, double> result;
  for (const auto& [name, sum] : sums_) {
    result[name] = sum.weight > 0 ? sum.total / sum.weight : std::numeric_limits<double>::quiet_NaN();
  }
  return result;
}

std::map<std::string, double> RunningMeans::counts() const {
  std::map<std::string, double> result;
  for (const auto& [name, sum] : sums_) result[name] = sum.weight;
  return result;
}

RunningMeans RunningMeans::over(const DeviceMesh& mesh) const {
  const auto names = names_of(counts());
  auto numbers = at::empty({static_cast<int64_t>(2 * names.size())}, at::kDouble);
  auto* number = numbers.mutable_data_ptr<double>();
  for (const auto& [name, sum] : sums_) {
    *number++ = sum.total;
    *number++ = sum.weight;
  }
  const auto request = fmt::format("running means named {}", listed(names));
  const auto reduced = reduce(numbers, mesh, ReduceOp::kSum, "", request).cpu();
  auto all = *this;
  const auto* result = reduced.const_data_ptr<double>();
  for (auto& [name, sum] : all.sums_) {
    sum.total = *result++;
    sum.weight = *result++;
  }
  return all;
}

std::map<std::string, double> RunningMeans::means(const DeviceMesh& mesh) const { return over(mesh).means(); }

std::map<std::string, double> RunningMeans::counts(const DeviceMesh& mesh) const { return over(mesh).counts(); }

void RunningMeans::reset() {
  for (auto& [name, sum] : sums_) sum = {};
}

} // namespace tessera
