#include <tessera/training/loop/run/evaluation.h>

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include <tessera/base/edit_distance.h>
#include <tessera/collectives/process_context.h>
#include <tessera/training/averaged_model.h>
#include <tessera/training/loop/step/loss_sums.h>

namespace tessera::internal {

namespace {

/// While it lives, all modules are in evaluation mode; then each is in its own again.
class EvaluationMode {
 public:
  explicit EvaluationMode(torch::nn::Module& module) {
    for (auto& each : module.modules(/*include_self=*/false)) {
      const bool trains = each->is_training();
      modes_.emplace_back(std::move(each), trains);
    }
    self_ = {&module, module.is_training()};
    module.eval();
  }
  ~EvaluationMode() {
    self_.first->train(self_.second); // those below too
    for (const auto& [module, trains] : modes_) {
      if (module->is_training() != trains) module->train(trains);
    }
  }
  EvaluationMode(const EvaluationMode&) = delete;
  EvaluationMode& operator=(const EvaluationMode&) = delete;

 private:
  std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> modes_; // parents before their children
  std::pair<torch::nn::Module*, bool> self_;
};

enum class NextBatch { kIsThere, kNone, kStopped };

/// What all ranks have: a batch, or none.
NextBatch read_next(const EvaluationWork& work, std::optional<double>& count, Agreement& agreement, bool stops) {
  bool is_there = false;
  agreement.run("the data of the evaluation \"" + work.name + '"', [&] {
    is_there = work.next();
    if (!is_there) return;
    count = work.count();
    TORCH_CHECK_VALUE(count && std::isfinite(*count) && *count >= 0, "a batch counts ",
                      count ? fmt::format("{}", *count) : "nothing that is known: give the trainer a count()");
  });
  std::vector<double> sums{is_there ? 1.0 : 0.0, stops ? 1.0 : 0.0, agreement.has_failed() ? 1.0 : 0.0}, none;
  agreement.reduce(sums, none, "the agreement in an evaluation");
  if (sums[2] > 0) agreement.throw_failures();
  if (sums[1] > 0) return NextBatch::kStopped;
  const auto ranks = static_cast<double>(agreement.size());
  TORCH_CHECK(sums[0] == 0 || sums[0] == ranks, "Trainer: the data of the evaluation \"", work.name, "\" have ended on ",
              ranks - sums[0], " of ", ranks, " ranks alone");
  return sums[0] == 0 ? NextBatch::kNone : NextBatch::kIsThere;
}

std::string name_of(const std::string& metric) { return metric.substr(0, metric.find('.')); }

} // namespace

std::optional<EvaluationEvent> evaluate(torch::nn::Module& module, const EvaluationWork& work, int64_t step, Agreement& agreement,
                                        const std::function<bool()>& is_to_stop) {
  const at::NoGradGuard no_grad;
  std::optional<AveragedWeights> averaged;
  if (work.average != nullptr) averaged.emplace(*work.average, module);
  const EvaluationMode mode(module);
  LossSums sums;
  agreement.run("the start of the evaluation \"" + work.name + '"', work.begin);
  int64_t batches = 0;
  for (std::optional<double> count;; ++batches) {
    const auto next = read_next(work, count, agreement, is_to_stop());
    if (next == NextBatch::kStopped) return std::nullopt;
    if (next == NextBatch::kNone) break;
    sums.add(work.loss(), *count, fmt::format("batch {} of the evaluation \"{}\"", batches, work.name), agreement);
  }
  TORCH_CHECK_VALUE(batches > 0, "Trainer: the evaluation \"", work.name, "\" has no batch");
  AgreedNames names;
  Beside beside;
  auto means = sums.reduce(agreement, names, beside);
  TORCH_CHECK_VALUE(means.count > 0, "Trainer: nothing counts in the ", batches, " batches of the evaluation \"", work.name, '"');
  return EvaluationEvent{
      .name = work.name, .step = step, .loss = means.loss, .count = means.count, .also = std::move(means.also)};
}

double metric_in(const std::vector<EvaluationEvent>& events, const std::string& metric) {
  std::map<std::string, double> numbers;
  for (const auto& event : events) {
    numbers.emplace(event.name, event.loss);
    for (const auto& [name, value] : event.also) numbers.emplace(event.name + '.' + name, value);
  }
  if (const auto found = numbers.find(metric); found != numbers.end()) return found->second;
  std::string names;
  for (const auto& [name, value] : numbers) names += (names.empty() ? "" : ", ") + name;
  TORCH_CHECK_VALUE(false, "Trainer: no evaluation has the number \"", metric, "\"; there are ", names);
}

void check_names(const std::vector<EvaluationWork>& works) {
  std::set<std::string> names;
  for (const auto& work : works) {
    TORCH_CHECK_VALUE(!work.name.empty(), "Trainer: the name of an evaluation is empty");
    TORCH_CHECK_VALUE(names.insert(work.name).second, "Trainer: two evaluations have the name \"", work.name, '"');
  }
}

void check_metric(const std::vector<EvaluationWork>& works, const std::string& metric, const char* option) {
  if (metric.empty()) return;
  const auto is_here = [&](const auto& work) { return metric == work.name || metric.starts_with(work.name + '.'); };
  if (std::any_of(works.begin(), works.end(), is_here)) return;
  TORCH_CHECK_VALUE(!works.empty(), "Trainer: ", option, " is \"", metric, "\", but there is no evaluation: call evaluate()");
  const auto nearest = std::min_element(works.begin(), works.end(), [&](const auto& a, const auto& b) {
    return edit_distance(a.name, name_of(metric)) < edit_distance(b.name, name_of(metric));
  });
  TORCH_CHECK_VALUE(false, "Trainer: ", option, " is \"", metric, "\", which no evaluation is called; did you mean \"",
                    nearest->name, "\"?");
}

bool improve(BestMetric& best, double value, int64_t step, Better better, double min_change) {
  const double gain = !best.value ? 0 : better == Better::kSmaller ? *best.value - value : value - *best.value;
  const bool is_better = !std::isnan(value) && (!best.value || gain > min_change);
  if (is_better)
    best = {.value = value, .step = step, .without_improvement = 0};
  else
    ++best.without_improvement;
  return is_better;
}

} // namespace tessera::internal
