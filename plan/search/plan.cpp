#include <tessera/plan/search.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include <tessera/base/error_text.h>
#include <tessera/fsdp/meta_init.h>
#include <tessera/plan/search/candidates.h>
#include <tessera/plan/search/limits.h>
#include <tessera/plan/step/planned_step.h>

namespace tessera {

namespace internal {

namespace {

int64_t elements_of(const PlannedModel& model) {
  TORCH_CHECK_VALUE(model.build, "plan: ", model.name, " has no function build");
  const auto module = on_meta(model.build);
  int64_t elements = 0;
  for (const auto& parameter : module->parameters()) elements += parameter.numel();
  return elements;
}

void check_search(const SearchOptions& options) {
  TORCH_CHECK_VALUE(options.budget >= 0, "plan: budget is ", options.budget, " bytes, but must not be negative");
  TORCH_CHECK_VALUE(options.global_rows >= 0, "plan: global_rows is ", options.global_rows, ", but must not be negative");
  TORCH_CHECK_VALUE(options.max_rows >= 1, "plan: max_rows is ", options.max_rows, ", but must be positive");
  TORCH_CHECK_VALUE(options.max_steps >= 1, "plan: max_steps is ", options.max_steps, ", but must be positive");
  const auto check = [](bool is_there, const char* name) { TORCH_CHECK_VALUE(is_there, "plan: ", name, " is empty"); };
  check(!options.layouts.empty(), "layouts");
  check(!options.precisions.empty(), "precisions");
  check(!options.optimizers.empty(), "optimizers");
  check(!options.recompute.empty(), "recompute");
  check(!options.keeps.empty(), "keeps");
  check(!options.float8.empty(), "float8");
  check(!options.float8_gather.empty(), "float8_gather");
  check(!options.offload.empty(), "offload");
  check(!options.schedules.empty(), "schedules");
  check(!options.resident_stages.empty(), "resident_stages");
}

bool is_faster(const Prediction& a, const Prediction& b) { return a.rows_per_second() > b.rows_per_second(); }

} // namespace

Search::Search(const PlannedModel& model, const Machine& machine, const SearchOptions& options)
    : model_(model),
      machine_(machine),
      options_(options),
      candidates_(candidates_of(model, machine, options, elements_of(model))),
      most_steps_(options.max_steps) {}

std::optional<Prediction> Search::step(const PlanSettings& settings) {
  const auto text = settings.to_string();
  if (const auto found = known_.find(text); found != known_.end()) return found->second;
  if (stepped() >= most_steps_) {
    ++left_out_;
    return std::nullopt;
  }
  const auto known = known_.try_emplace(text).first;
  try {
    known->second = predict(model_, machine_, settings);
  } catch (const c10::Error& error) { // a size that the ranks do not divide
    ++refused_;
    if (first_refusal_.empty()) first_refusal_ = text + ": " + error_text(error);
    return std::nullopt;
  }
  const auto& prediction = *known->second;
  if (!settings.recompute) {
    const double flops = prediction.flops * static_cast<double>(machine_.ranks()) / static_cast<double>(prediction.global_rows());
    auto& least = flops_a_row_.try_emplace(settings.precision, flops).first->second;
    least = std::min(least, flops);
  }
  if (options_.progress) options_.progress(prediction);
  return prediction;
}

/// No rank computes faster than its rate. A recomputed forward adds at least a quarter.
bool Search::can_be_faster(const Candidate& candidate, double speed) const {
  const auto found = flops_a_row_.find(candidate.settings.precision);
  if (found == flops_a_row_.end()) return true;
  const auto& settings = candidate.settings;
  const auto simulation = simulation_of(machine_, settings);
  const double plain = *simulation.flops_per_second;
  const double rate = settings.float8 ? std::max(plain, *simulation.float8_flops_per_second) : plain;
  constexpr double kLeastRecomputed = 1.1; // what is recomputed may leave out parts of the model
  const bool repeats_all = settings.recompute && settings.keeps == RecomputeKeeps::kNothing;
  return rate * static_cast<double>(machine_.ranks()) / (found->second * (repeats_all ? kLeastRecomputed : 1)) > speed;
}

bool Search::fits(const Prediction& prediction, int64_t budget) const {
  const bool fits_host = machine_.host_memory == 0 || prediction.host_bytes * machine_.ranks_a_host <= machine_.host_memory;
  return prediction.peak() <= budget && fits_host;
}

/// Memory rises with the rows: the most that fit are found by halving.
std::optional<Prediction> Search::largest(const Candidate& candidate, int64_t budget, double least_speed) {
  const auto all = with_rows(candidate.settings, options_);
  considered_ += static_cast<int64_t>(all.size());
  if (all.empty() || candidate.least_bytes > budget || !can_be_faster(candidate, least_speed)) return std::nullopt;
  auto best = step(all.front());
  if (!best || !fits(*best, budget)) return std::nullopt;
  size_t low = 0, high = all.size(); // the first fits; what is at `high` or beyond does not, or was not tried
  while (low + 1 < high) {
    const auto middle = high == all.size() && low == 0 ? size_t{1} : (low + high) / 2;
    const auto here = step(all[middle]);
    if (here && fits(*here, budget)) {
      low = middle;
      if (is_faster(*here, *best)) best = here;
    } else {
      high = middle;
    }
  }
  return best;
}

std::vector<Prediction> Search::fitting(int64_t budget, const std::vector<Candidate>& candidates) {
  std::vector<Prediction> found;
  for (const auto& candidate : candidates) {
    // As fast as the last runner-up, or it is of no use.
    const auto wanted = static_cast<size_t>(options_.runners_up);
    const double least = found.size() > wanted ? found[wanted].rows_per_second() : 0;
    const auto one = largest(candidate, budget, least);
    if (!one) continue;
    found.insert(std::upper_bound(found.begin(), found.end(), *one, is_faster), *one);
  }
  return found;
}

std::optional<Prediction> Search::smallest() const {
  std::optional<Prediction> least;
  for (const auto& [text, prediction] : known_) {
    if (prediction && (!least || prediction->peak() < least->peak())) least = prediction;
  }
  TORCH_CHECK(least || first_refusal_.empty(), "plan: no setting can be stepped. The first was ", first_refusal_);
  return least;
}

/// What would fit is looked for among those that keep least.
void step_the_smallest(Search& search) {
  constexpr size_t kTried = 24;
  auto candidates = search.candidates();
  const auto key = [](const Candidate& each) { return std::pair(each.least_bytes, !each.settings.recompute); };
  std::stable_sort(candidates.begin(), candidates.end(), [&](const auto& a, const auto& b) { return key(a) < key(b); });
  if (candidates.size() > kTried) candidates.resize(kTried);
  for (auto& each : candidates) each.least_bytes = 0; // so that none is ruled out
  search.fitting(/*budget=*/0, candidates);
}

} // namespace internal

Plan plan(const PlannedModel& model, const Machine& machine, const SearchOptions& options) {
  machine.check();
  internal::check_search(options);
  Plan made{.machine = machine, .budget = options.budget > 0 ? options.budget : machine.memory};
  internal::Search search(model, machine, options);
  TORCH_CHECK_VALUE(!search.candidates().empty(), "plan: no mesh of ", machine.ranks(), " ranks fits ", model.name,
                    " and the options");
  auto found = search.fitting(made.budget, search.candidates());
  made.is_complete = search.left_out() == 0;
  made.considered = search.considered(); // once: limits look at the same ones again
  TORCH_CHECK_VALUE(made.considered > 0, "plan: no setting has ", options.global_rows, " rows a step: they must be the rows of ",
                    "a micro-batch, at most ", options.max_rows,
                    ", times micro-batches, times the ranks that have rows of their own");
  search.allow_steps(std::max<int64_t>(options.max_steps / 4, 1));
  if (found.empty()) {
    internal::step_the_smallest(search);
  } else {
    made.best = found.front();
    for (size_t i = 1; i < found.size() && std::ssize(made.runners_up) < options.runners_up; ++i)
      made.runners_up.push_back(found[i]);
    made.limits = internal::limits_of(search, found.front(), made.budget);
  }
  made.smallest = search.smallest();
  made.stepped = search.stepped();
  made.refused = search.refused();
  made.first_refusal = search.first_refusal();
  return made;
}

} // namespace tessera
