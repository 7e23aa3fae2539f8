#include "script.h"

#include <c10/util/Exception.h>
#include <tessera/collectives/process_context.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/fsdp/model/sharded_module.h>
#include <tessera/optim/shard_optimizer.h>

#include <algorithm>
#include <iostream>
#include <limits>

#include <tessera/tests/fsdp/scripts/action.h>
#include <tessera/tests/fsdp/scripts/compare.h>
#include <tessera/tests/fsdp/scripts/pass.h>
#include <tessera/tests/fsdp/scripts/random_policy.h>
#include <tessera/tests/fsdp/scripts/random_sharding.h>
#include <tessera/tests/fsdp/scripts/replay.h>

namespace tessera::testing::scripts {
namespace {

constexpr double kTolerance = 1e-9;
constexpr double kToleranceInFloat = 5e-3;  ///< with all that is computed in float, of which deep models make more
constexpr double kToleranceOfFloats = 1e-4; ///< with a parameter in float or bfloat16, or gradients that are reduced in float
constexpr double kMostPartings = 16;        ///< of two unsharded models, where these part: what the sharded one may differ by

struct Step {
  const Action* action;
  size_t trainee;
  uint64_t seed;
  bool compares_state;
};

/// The message of what `call` throws, "" when it returns.
template <typename Call>
std::string error_of(const Call& call) {
  try {
    call();
    return "";
  } catch (const c10::Error& error) {
    return std::string("error: ") + error.what_without_backtrace();
  } catch (const std::exception& error) {
    return std::string("error: ") + error.what();
  }
}

std::vector<Action> actions_often() {
  auto chosen = actions();
  std::erase_if(chosen, [](const Action& action) { return Replay::from_environment().often.count(action.name) == 0; });
  return chosen;
}

bool is_replica(RandomModel& model) {
  if (!is_sharded(model)) return false;
  const auto state = fsdp(model).state();
  return state->roles().strategy() == tessera::Strategy::kNoShard && state->subtree().size() == 1;
}

class Script {
 public:
  Script(uint64_t seed, const std::filesystem::path& folder) : plain_(false, folder), sharded_(true, folder) {
    sharded_.streams = ProgramStreams(seed);
    Draw draw(seed);
    is_parallel_ = seed >= kFirstInParallel;
    if (seed >= kFirstInLowPrecision && !is_parallel_) precision_.emplace(draw);
    if (precision_) compute_in(*precision_);
    const auto pool = draw_pool(draw);
    for (int i = 0; i < 2; ++i) add_trainee(pool, draw);
    draw_steps(draw);
    description_ += sharded_.streams.description();
  }

  std::optional<ScriptFailure> run(const std::set<int64_t>& left_out);

 private:
  std::vector<BlockKind> draw_pool(Draw& draw) const;
  void compute_in(const LowPrecision& precision);
  std::function<std::shared_ptr<RandomModel>()> builder(uint64_t seed, const std::vector<BlockKind>& pool) const;
  void add_trainee(const std::vector<BlockKind>& pool, Draw& draw);
  void draw_steps(Draw& draw);
  std::string settle(size_t trainee, uint64_t seed);
  void prepare();
  std::string recover(uint64_t seed);
  std::string take(const Step& step, Side& side) const;
  std::optional<ScriptFailure> compare(const Step& step, const std::string& plain_error, const std::string& sharded_error);
  std::optional<ScriptFailure> fail(const std::string& what, bool ranks_disagree = false) const;
  static void trace(const std::string& text);
  bool is_exact() const;
  Tolerance tolerance() const;
  void take_over();
  double largest() const;

  Side plain_, sharded_;
  std::optional<LowPrecision> precision_; ///< of an unsharded side that emulates a policy
  bool is_parallel_ = false;              ///< half of the actions are those of a parallel model
  std::vector<Step> steps_;
  bool diverged_ = false;
  int64_t now_ = 0;
  std::string description_;
};

std::vector<BlockKind> Script::draw_pool(Draw& draw) const {
  auto all = precision_ ? block_kinds_by_rows() : block_kinds();
  // Its constants of the shape of a parameter take the parameter's dtype, whatever the inputs have.
  const bool all_cast = !precision_ || (precision_->casts_inputs && precision_->casts_blocks);
  if (!all_cast) std::erase_if(all, [](const BlockKind& kind) { return kind.name == "gated"; });
  std::erase_if(all, [](const BlockKind& kind) { return Replay::from_environment().leaves_out(kind.name); });
  if (draw.chance(30)) return all;
  std::vector<BlockKind> few;
  const int64_t count = 1 + draw.below(4);
  for (int64_t i = 0; i < count; ++i) few.push_back(draw.of(all));
  return few;
}

void Script::compute_in(const LowPrecision& precision) {
  description_ += "  " + precision.description() + '\n';
  for (auto* side : {&plain_, &sharded_}) side->rounding_in_evaluation = precision.rounding_in_evaluation();
}

std::function<std::shared_ptr<RandomModel>()> Script::builder(uint64_t seed, const std::vector<BlockKind>& pool) const {
  const auto input_dtype = precision_ && precision_->casts_blocks ? std::optional(precision_->param_dtype) : std::nullopt;
  return [seed, pool, input_dtype] {
    auto model = std::make_shared<RandomModel>(seed, pool);
    model->set_input_dtype(input_dtype);
    return model;
  };
}

void Script::add_trainee(const std::vector<BlockKind>& pool, Draw& draw) {
  const auto seed = draw.seed(), sharding_seed = draw.seed();
  const OptimizerPlan plan(draw);
  const bool optimizer_first = draw.chance(30);
  // The write to a view of what is read in fewer bits would round the parameter.
  const bool writes_views = draw.chance(75) && !precision_;
  const auto policy = precision_ ? std::optional(precision_->policy(draw)) : std::nullopt;
  const auto build = builder(seed, pool);

  auto model = build();
  auto optimizer = plan.make(*model);
  plain_.trainees.push_back({build, model, {}, plan, std::move(optimizer), {}, {}});
  auto twin = build();
  std::unique_ptr<torch::optim::Optimizer> of_twin;
  if (optimizer_first) of_twin = plan.make(*twin);
  const auto shard = [sharding_seed, extends = !writes_views && !precision_, policy](RandomModel& model) {
    return shard_at_random(model, sharding_seed, extends, policy);
  };
  const auto sharding = shard(*twin);
  const bool moved_itself = sharding.ignores && !tests_the_cpu(); // the program its parameters, and not their state
  if (optimizer_first && !moved_itself) {
    shard_optimizer(*of_twin);
  } else {
    of_twin = plan.make(*twin);
  }
  sharded_.trainees.push_back({build, twin, shard, plan, std::move(of_twin), {}, {}});

  sharded_.trainees.back().is_exact = model->is_double() && !(precision_ && precision_->rounding() > 0);
  sharded_.trainees.back().take(sharding);
  for (auto* side : {&plain_, &sharded_}) {
    side->trainees.back().writes_views = writes_views;
    side->trainees.back().policy = policy;
  }
  if (policy) plain_.trainees.back().emulation = std::make_shared<EmulatedPolicy>(*policy, process_context().world_size());
  description_ += c10::str("  model: ", model->description(), "\n    ", sharding.description, "; ", plan.name(),
                           optimizer_first ? " built first\n" : "\n");
}

void Script::draw_steps(Draw& draw) {
  const int64_t count = 10 + draw.below(11);
  const bool always_compares = draw.chance(50);
  static const auto own = parallel_actions(), often = actions_often();
  for (int64_t i = 0; i < count; ++i) {
    const bool in_parallel = is_parallel_ && draw.chance(50);
    const bool is_often = !often.empty() && draw.chance(50);
    const auto& action = random_action(draw, is_often ? often : in_parallel ? own : actions());
    const auto trainee = static_cast<size_t>(draw.below(2));
    const auto seed = draw.seed();
    steps_.push_back({&action, trainee, seed, draw.chance(25) || always_compares || i == count - 1});
  }
}

/// Brings the gradients that wait into grad(), by a backward that reduces all of them. Returns what went wrong on one side alone.
/// A script in which it throws on both, as for a block that mixes dtypes, ends.
std::string Script::settle(size_t trainee, uint64_t seed) {
  const auto settle_one = [&](Side& side) {
    auto& chosen = side.trainees[trainee];
    return error_of([&] { backward(whole_loss(side, chosen, seed)); });
  };
  const auto plain_error = settle_one(plain_), sharded_error = settle_one(sharded_);
  diverged_ = !plain_error.empty() && !sharded_error.empty();
  if (plain_error.empty() != sharded_error.empty()) return "unsharded: " + plain_error + "\n  sharded: " + sharded_error;
  for (auto* side : {&plain_, &sharded_}) side->trainees[trainee].gradients_wait = false;
  return "";
}

/// After an error that both sides threw: gives up what it left behind.
std::string Script::recover(uint64_t seed) {
  for (size_t i = 0; i < sharded_.trainees.size(); ++i) {
    auto module = fsdp(*sharded_.trainees[i].model);
    module.set_requires_gradient_sync(true);
    module.set_requires_all_reduce(true);
    module.set_is_last_backward(true);
    if (plain_.trainees[i].gradients_wait) {
      if (const auto error = settle(i, seed); !error.empty() || diverged_) return error;
    }
    for (auto* side : {&plain_, &sharded_}) {
      side->trainees[i].is_last_backward = true;
      side->trainees[i].model->zero_grad();
    }
    module.zero_grad(); // and forgets the micro-batches that were in flight
  }
  return "";
}

bool Script::is_exact() const {
  const auto& all = sharded_.trainees;
  return std::all_of(all.begin(), all.end(), [](const Trainee& each) { return each.is_exact; });
}

Tolerance Script::tolerance() const {
  if (precision_ && precision_->rounding() > 0) // each forward of the action starts from what those before have rounded
    return {precision_->rounding() * std::max(1, plain_.forwards), Tolerance::Of::kTensor};
  const auto& all = sharded_.trainees;
  const bool in_float = std::any_of(all.begin(), all.end(), [](const Trainee& each) { return each.computes_in_float; });
  const double bound = in_float ? kToleranceInFloat : is_exact() || precision_ ? kTolerance : kToleranceOfFloats;
  return {std::max(bound, kMostPartings * plain_.parting), Tolerance::Of::kElement};
}

/// What two sides have rounded otherwise goes on from the same numbers, so that each action is compared by itself.
void Script::take_over() {
  const torch::NoGradGuard no_grad;
  for (size_t i = 0; i < plain_.trainees.size(); ++i) {
    const auto to = distinct(plain_.trainees[i].model->parameters());
    const auto from = distinct(sharded_.trainees[i].model->parameters());
    for (size_t k = 0; k < to.size(); ++k) {
      to[k].data().copy_(whole(from[k]));
      if (to[k].grad().defined() && !plain_.trainees[i].gradients_wait) to[k].mutable_grad().copy_(whole(from[k].grad()));
    }
    if (!plain_.trainees[i].gradients_wait) plain_.trainees[i].emulation->begin();
  }
}

/// What is reduced in float rounds relative to the largest number, and the tolerance is relative to each.
double Script::largest() const { return is_exact() ? std::numeric_limits<double>::max() : 100; }

std::string Script::take(const Step& step, Side& side) const {
  side.recorded.clear();
  side.forwards = 0;
  side.parting = 0;
  side.notes.clear();
  Draw draw(step.seed);
  Turn turn{side, side.trainees[step.trainee], side.trainees[1 - step.trainee], draw};
  const auto error = error_of([&] { side.streams.run(step.seed, [&] { step.action->run(turn); }); });
  if (Replay::from_environment().script && side.sharded && !error.empty()) // on any rank: the others may wait for it
    std::cerr << "      rank " << process_context().rank() << ": " << error.substr(0, 300) << std::endl;
  return error;
}

/// What an action of either side may ask of the sharded one, also of its other model.
void Script::prepare() {
  for (size_t i = 0; i < plain_.trainees.size(); ++i) {
    auto& plain = plain_.trainees[i];
    auto& sharded = sharded_.trainees[i];
    plain.is_replica = sharded.is_replica = is_replica(*sharded.model) && !sharded.ignores;
    plain.ignores = sharded.ignores;
    plain.on_one_mesh = sharded.on_one_mesh = lie_on_one_mesh(sharded.model->parameters());
    plain.is_exact = sharded.is_exact;
    plain.computes_in_float = sharded.computes_in_float;
  }
}

std::optional<ScriptFailure> Script::run(const std::set<int64_t>& left_out) {
  const auto& replay = Replay::from_environment();
  const auto last = std::min(replay.steps, static_cast<int64_t>(steps_.size()));
  for (now_ = 0; now_ < last && !diverged_; ++now_) {
    const auto& step = steps_[static_cast<size_t>(now_)];
    const bool passes = replay.leaves_out(step.action->name) || replay.leaves_out(std::to_string(now_));
    if (passes || left_out.count(now_) > 0) continue;
    trace(c10::str("  ", now_, ' ', step.action->name, ", model ", step.trainee));
    const bool waits = plain_.trainees[step.trainee].gradients_wait;
    if (waits && step.action->when == When::kReduced) {
      const auto error = settle(step.trainee, step.seed);
      if (sum_over_ranks(!error.empty()) > 0) return fail("before it, at a backward that reduces all gradients: " + error);
      if (diverged_) break;
    }
    prepare();
    const auto plain_error = take(step, plain_), sharded_error = take(step, sharded_);
    for (const auto& note : sharded_.notes) trace("      " + note);
    if (auto failure = compare(step, plain_error, sharded_error)) return failure;
  }
  return {};
}

std::optional<ScriptFailure> Script::compare(const Step& step, const std::string& plain_error, const std::string& sharded_error) {
  const auto threw = sum_over_ranks(!sharded_error.empty());
  const bool ranks_disagree = threw > 0 && threw < process_context().world_size();
  if (sum_over_ranks(plain_error.empty() != sharded_error.empty()) > 0)
    return fail(c10::str("unsharded: ", plain_error, "\n  sharded: ", sharded_error), ranks_disagree);
  if (sum_over_ranks(plain_.recorded.size() != sharded_.recorded.size()) > 0)
    return fail(c10::str(sharded_.recorded.size(), " numbers, not ", plain_.recorded.size(), ' ', sharded_error));
  if ((diverged_ = !is_bounded(plain_, largest()))) return {};
  auto different = difference_of_recorded(plain_, sharded_, tolerance());
  if (!plain_error.empty()) {
    trace("      both: " + sharded_error.substr(0, 200));
    const auto error = recover(step.seed);
    if (sum_over_ranks(!error.empty()) > 0) return fail("on from " + sharded_error + "\n  " + error);
    if (diverged_) return {};
  }
  const bool parts = kMostPartings * plain_.parting > kTolerance;
  if (different.empty() && (step.compares_state || precision_ || parts))
    different = difference_of_state(plain_, sharded_, tolerance());
  if (sum_over_ranks(!different.empty()) > 0) return fail(different.empty() ? "another rank has a difference" : different);
  if (precision_ && precision_->rounding() > 0) take_over();
  diverged_ = parts; // what comes next would amplify the difference
  return {};
}

std::optional<ScriptFailure> Script::fail(const std::string& what, bool ranks_disagree) const {
  if (process_context().rank() != 0) return ScriptFailure{now_, "  " + what, ranks_disagree}; // rank 0 tells the rest
  std::string steps;
  for (int64_t i = 0; i <= now_; ++i) {
    const auto& step = steps_[static_cast<size_t>(i)];
    steps += c10::str("  step ", i, ": ", step.action->name, ", model ", step.trainee, '\n');
  }
  for (const auto& note : sharded_.notes) steps += "    " + note + '\n';
  return ScriptFailure{now_, c10::str(description_, steps, "  ", what), ranks_disagree};
}

/// For a replay, as it goes: a script may hang.
void Script::trace(const std::string& text) {
  if (Replay::from_environment().script && process_context().rank() == 0) std::cerr << text << std::endl;
}

} // namespace

std::optional<ScriptFailure> run_script(uint64_t seed, const std::filesystem::path& folder, const std::set<int64_t>& left_out) {
  std::unique_ptr<Script> script;
  const auto error = error_of([&] { script = std::make_unique<Script>(seed, folder); });
  if (sum_over_ranks(!error.empty()) > 0) return ScriptFailure{-1, "  while the models were made and sharded: " + error};
  return script->run(left_out);
}

} // namespace tessera::testing::scripts
