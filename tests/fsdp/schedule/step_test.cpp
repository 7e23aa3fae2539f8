// What a step decides, by random sequences of events: no tensors, no ranks.
#include <gtest/gtest.h>

#include <tessera/fsdp/schedule/step.h>

#include <algorithm>
#include <functional>
#include <random>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <tessera/tests/support/sweep.h>

namespace tessera::testing::step_test {
namespace {

using internal::GroupPlace;
using internal::GroupRules;
using internal::is_open;
using internal::Reductions;
using internal::Residence;
using internal::Step;
using internal::StepGroups;

class Draw {
 public:
  explicit Draw(unsigned long seed) : generator_(seed) {}
  size_t below(size_t end) { return generator_() % end; }
  bool chance(size_t percent) { return below(100) < percent; }
  template <typename T>
  void shuffle(std::vector<T>& list) {
    std::shuffle(list.begin(), list.end(), generator_);
  }

 private:
  std::minstd_rand generator_;
};

struct Settings {
  bool exists = true;
  GroupRules rules;
  std::vector<size_t> forward_list, backward_list;
  size_t parameters = 2;
  bool leaves_out_any = false, has_only_buffer = false;
};

/// Groups that do what a step decides, and note it. `errors` tells what no step may do.
class FakeGroups final : public StepGroups {
 public:
  explicit FakeGroups(std::vector<Settings> settings) : settings(std::move(settings)), states(this->settings.size()) {}

  struct State {
    Residence residence = Residence::kSharded;
    bool is_stale = false;
    size_t expected = 0, landed = 0, to_come = 0, pending = 0;
    bool joins = false, is_reducing = false;
  };

  Residence residence(size_t group) const override { return settings[group].exists ? states[group].residence : Residence::kGone; }
  bool has_memory(size_t group) const override { return settings[group].exists; }
  bool is_stale(size_t group) const override { return states[group].is_stale && is_open(states[group].residence); }
  GroupRules rules(size_t group) const override { return settings[group].rules; }
  std::vector<size_t> prefetch_list(size_t group, bool in_backward) const override {
    return in_backward ? settings[group].backward_list : settings[group].forward_list;
  }

  void gather(size_t group) override {
    note("gather", group);
    check(residence(group) == Residence::kSharded, "gathers what is not sharded", group);
    check(!reads_alone || read_now.contains(group), "gathers ahead in a phase of weight gradients", group);
    states[group].residence = Residence::kGathering;
    states[group].is_stale = false;
  }
  void wait(size_t group) override {
    if (states[group].residence == Residence::kGathering) states[group].residence = Residence::kUnsharded;
  }
  void free(size_t group) override {
    note("free", group);
    check(!read_now.contains(group), "frees what is read", group);
    check(!held.contains(group) || states[group].is_stale, "frees what is held", group);
    states[group].residence = Residence::kSharded;
  }
  void free_after_forward(size_t group) override { free(group); }
  void fetch(size_t group) override { note("fetch", group); }

  bool expects_any(size_t group) const override { return states[group].expected > 0; }
  bool is_complete(size_t group) const override {
    return states[group].landed > 0 && states[group].landed >= states[group].expected;
  }
  bool awaits_any(size_t group) const override { return states[group].to_come > 0; }
  bool has_pending(size_t group) const override { return states[group].joins || states[group].pending > 0; }
  bool is_unfinished(size_t group) const override { return has_pending(group) || states[group].is_reducing; }
  bool leaves_out_any(size_t group) const override { return settings[group].leaves_out_any; }
  bool is_in_inner_backward() const override { return false; }

  void forget_landed(size_t group) override { states[group].landed = 0; }
  void join_reduction(size_t group) override { states[group].joins = true; }
  void keep_unreduced(size_t group) override {
    note("keep", group);
    states[group].landed = 0;
    states[group].joins = false;
  }
  void withhold_unreduced(size_t group) override { note("withhold", group); }
  bool start_reduction(size_t group) override {
    note("reduce", group);
    reduced.push_back(group);
    check(has_pending(group), "reduces nothing", group);
    check(!states[group].is_reducing, "reduces what is being reduced", group);
    const auto in_flight = std::count_if(states.begin(), states.end(), [](const State& each) { return each.is_reducing; });
    check(in_flight <= 1, "has too many reductions in flight", group);
    sum += states[group].pending;
    states[group].pending = states[group].landed = 0;
    states[group].joins = false;
    states[group].is_reducing = true;
    return true;
  }
  void advance_reduction(size_t /*group*/) override {}
  void finish_reduction(size_t group) override { states[group].is_reducing = false; }

  void check(bool holds, const char* what, size_t group) {
    if (!holds && errors.empty()) errors = what + (": " + std::to_string(group));
  }
  void note(std::string_view action, size_t group) { actions.emplace_back(action, group); }

  std::vector<Settings> settings;
  std::vector<State> states;
  std::set<size_t> held;       ///< by hand, before its read in a forward
  std::set<size_t> read_now;   ///< by an op that runs
  bool reads_alone = false;    ///< what gathers
  size_t sum = 0;              ///< of the gradients that reductions took
  std::vector<size_t> reduced; ///< in the order of their reductions
  std::vector<std::pair<std::string_view, size_t>> actions;
  std::string errors;
};

/// A model: the places of its groups, and how they are set.
struct Model {
  std::vector<GroupPlace> places;
  std::vector<Settings> settings;
};

Settings draw_settings(Draw& draw) {
  Settings settings;
  settings.rules.reshards_after_forward = draw.chance(80);
  settings.rules.reshards_after_backward = draw.chance(85);
  settings.rules.is_offloaded = draw.chance(10);
  settings.rules.prefetch = {.is_prefetched_in_backward = draw.chance(90), .depth = static_cast<int64_t>(draw.below(3))};
  settings.leaves_out_any = draw.chance(10);
  settings.rules.keeps_gradients = draw.chance(10);
  settings.rules.reductions = draw.chance(80) ? Reductions::kOne : draw.chance(50) ? Reductions::kTwo : Reductions::kSecondOne;
  settings.has_only_buffer = draw.chance(20);
  return settings;
}

/// A module with none, one or two groups, and those below it.
void add_modules(Model& model, Draw& draw, size_t depth) {
  const size_t groups = draw.chance(15) ? 0 : draw.chance(10) ? 2 : 1;
  const size_t first = model.places.size(), end = first + std::max<size_t>(groups, 1);
  Settings settings = draw_settings(draw);
  settings.exists = groups > 0;
  settings.rules.reshards_after_forward = settings.rules.reshards_after_forward && depth > 0;
  for (size_t i = first; i < end; ++i) {
    model.places.push_back({.module = {first, end}, .end = 0});
    settings.parameters = 1 + draw.below(3);
    model.settings.push_back(settings);
  }
  for (size_t below = depth < 3 ? draw.below(4) : 0; below > 0; --below) add_modules(model, draw, depth + 1);
  for (size_t i = first; i < end; ++i) model.places[i].end = model.places.size();
}

Model draw_model(Draw& draw) {
  Model model;
  add_modules(model, draw, 0);
  for (auto& settings : model.settings) {
    for (auto* list : {&settings.forward_list, &settings.backward_list}) {
      if (draw.chance(5)) list->push_back(draw.below(model.places.size()));
    }
  }
  return model;
}

/// Sends the events of a few steps, which `draw` chooses, to a step. `landings` shuffles the gradients that may land in any
/// order.
class Program {
 public:
  Program(const Model& model, unsigned long seed, unsigned long landings)
      : groups(model.settings), draw_(seed), landings_(landings), step_(groups) {
    step_.set_places(model.places);
    for (size_t each = 0; each < model.places.size(); ++each) {
      if (model.settings[each].exists) all_.push_back(each);
    }
  }

  void run() {
    for (size_t steps = 2 + draw_.below(3); steps > 0 && !all_.empty(); --steps) {
      set();
      if (draw_.chance(40) && step_.state() == Step::State::kIdle) {
        if (micro_batches() && draw_.chance(70)) write();
        continue;
      }
      if (!forward()) continue; // threw: the next one goes on
      if (draw_.chance(20)) continue;
      draw_.chance(15) ? failed_backward() : whole_backward();
      if (draw_.chance(70)) write();
    }
    if (all_.empty()) return;
    end();
  }

  FakeGroups groups;

 private:
  void set() {
    groups.held.clear();
    step_.set_is_last_backward(draw_.chance(80));
    const bool syncs = draw_.chance(75);
    for (auto& each : groups.settings) each.rules.syncs = syncs;
    if (draw_.chance(10)) step_.look_anew();
    if (draw_.chance(10)) step_.reshard(any());
    if (draw_.chance(5)) step_.reshard_after_forward(any());
    if (draw_.chance(10)) {
      const size_t held = any();
      step_.unshard(held);
      groups.held.insert(held);
      by_hand_.insert(held);
    }
  }

  size_t any() { return all_[draw_.below(all_.size())]; }

  void write() {
    for (auto& each : groups.states) each.is_stale = true;
  }

  /// What the forwards that follow read, unless they depart from it: some groups in another order, and some twice.
  void draw_order() {
    order_ = all_;
    if (draw_.chance(30)) draw_.shuffle(order_);
    for (size_t i = 0; i < order_.size(); ++i) {
      if (draw_.chance(10)) order_.insert(order_.begin() + static_cast<std::ptrdiff_t>(draw_.below(order_.size())), order_[i]);
    }
  }

  struct How {
    bool in_backward = false;
    uint64_t recomputation = 0;
    bool by_own_function = false, in_grad_mode = true;
  };
  /// An op reads `list`, and they are all there when it runs.
  void read(const std::vector<size_t>& list, const How& how) {
    auto before = step_.keep_open(list.size() > 1 ? list : std::vector<size_t>());
    for (const size_t each : list) {
      groups.held.erase(each);
      by_hand_.erase(each);
      if (groups.is_stale(each)) step_.written(each);
      groups.read_now.insert(each);
      step_.read({each, groups.residence(each), how.in_backward, how.recomputation, how.by_own_function, how.in_grad_mode});
    }
    for (const size_t each : list) {
      groups.check(groups.residence(each) == Residence::kUnsharded, "does not gather what is read", each);
    }
    groups.read_now.clear();
    step_.keep_open(std::move(before));
  }

  bool forward() {
    if (step_.state() == Step::State::kIdle) {
      step_.begin_forward();
      reads_.clear();
    }
    if (draw_.chance(20) || order_.empty()) draw_order();
    const bool trains = draw_.chance(80);
    for (const size_t each : order_) {
      if (draw_.chance(3)) return false;
      if (draw_.chance(10)) continue; // skipped
      std::vector<size_t> list{each};
      if (const size_t other = any(); draw_.chance(10) && other != each) list.push_back(other);
      read(list, {.in_grad_mode = trains});
      for (const size_t read : list) {
        reads_.push_back(read);
        groups.states[read].expected = groups.settings[read].parameters;
      }
    }
    return true;
  }

  void land(size_t group) {
    auto& state = groups.states[group];
    step_.expect_landing(group, groups.settings[group].has_only_buffer && state.pending == 0);
    ++state.landed, ++state.pending, --state.to_come, ++landed_;
    landed_now_.insert(group);
    if (step_.landed(group, groups.is_complete(group))) step_.reduce_after(group);
  }

  /// The gradients of the groups that were read, but those that the loss leaves out, in any order.
  std::vector<size_t> gradients_to_come() {
    std::vector<size_t> come;
    for (auto& state : groups.states) state.to_come = 0;
    for (const size_t each : std::set<size_t>(reads_.begin(), reads_.end())) {
      if (draw_.chance(10)) continue; // unused
      const size_t count = groups.settings[each].parameters - (draw_.chance(10) ? 1 : 0);
      come.insert(come.end(), count, each);
      groups.states[each].to_come = count;
    }
    landings_.shuffle(come);
    return come;
  }

  /// Reads in the reverse order, with recomputations, and gradients between.
  void backward_events(size_t percent) {
    groups.held.clear();
    step_.begin_backward();
    auto come = gradients_to_come();
    const size_t end = reads_.size() * percent / 100;
    for (size_t i = 0; i < end; ++i) {
      const size_t group = reads_[reads_.size() - 1 - i];
      const uint64_t recomputation = draw_.chance(20) ? 1 + i / 3 : 0;
      const bool by_own_function = draw_.chance(5);
      if (!reads_nothing_)
        read({group}, {.in_backward = true, .recomputation = recomputation, .by_own_function = by_own_function});
      for (size_t count = landings_.below(4); count > 0 && !come.empty(); --count) {
        land(come.back());
        come.pop_back();
      }
    }
    for (; percent == 100 && !come.empty(); come.pop_back()) land(come.back());
  }

  void whole_backward() {
    landed_now_.clear();
    const auto before = static_cast<std::ptrdiff_t>(groups.reduced.size());
    backward_events(100);
    step_.reduce_the_rest();
    step_.end_backward();
    const std::set<size_t> reduced(groups.reduced.begin() + before, groups.reduced.end());
    for (const size_t landed : landed_now_) {
      const auto& module = step_.place_of(landed).module;
      for (size_t each = module.first; each < module.end; ++each)
        groups.check(!reduced.contains(landed) || reduced.contains(each), "leaves out a bucket", each);
    }
    for (size_t each = 0; each < groups.states.size(); ++each) {
      const auto& state = groups.states[each];
      const auto& settings = groups.settings[each];
      groups.check(!is_open(state.residence) || !settings.rules.reshards_after_backward || stays_whole(), "leaves open", each);
      groups.check(!state.is_reducing || !step_.is_last_backward(), "leaves a reduction", each);
      const bool reduces = settings.rules.syncs && (step_.is_last_backward() || !settings.rules.keeps_gradients);
      groups.check(!groups.has_pending(each) || !reduces || step_.micro_batches().running(), "leaves gradients", each);
    }
  }

  /// In a phase of a micro-batch that is not the last.
  bool stays_whole() const { return step_.micro_batches().keeps_gathered() && !step_.micro_batches().running()->is_last; }

  /// Whether it went to its end, as `run` says.
  bool phase(const MicroBatch& phase, const std::function<bool()>& run) {
    const auto refusal = step_.micro_batches().refusal(phase, /*trains=*/true);
    groups.check(refusal.empty(), "refuses a phase", static_cast<size_t>(phase.index));
    step_.begin_phase(phase, /*trains=*/true);
    groups.reads_alone = reads_nothing_ = phase.phase == MicroBatchPhase::kWeightGradients;
    const bool has_failed = !run();
    if (!has_failed && step_.micro_batches().lacks_backward()) { // its gradients are reduced all the same
      groups.held.clear();
      step_.begin_backward();
      step_.reduce_the_rest();
      step_.end_backward();
    }
    groups.reads_alone = reads_nothing_ = false;
    const size_t before = groups.actions.size();
    step_.end_phase(has_failed);
    const auto ahead = gathered_since(before); // for the next phase
    groups.check(ahead.size() <= (has_failed || phase.is_last ? 0U : 1U), "gathers too much ahead", ahead.size());
    if (phase.residency == Residency::kStage && !phase.is_last) return !has_failed;
    for (size_t each = 0; each < groups.states.size() && !has_failed; ++each) {
      const bool may_stay = !groups.settings[each].rules.reshards_after_backward || by_hand_.contains(each);
      groups.check(!is_open(groups.states[each].residence) || may_stay || ahead.contains(each), "leaves open after a scope",
                   each);
    }
    return !has_failed;
  }

  std::set<size_t> gathered_since(size_t action) const {
    std::set<size_t> gathered;
    for (; action < groups.actions.size(); ++action) {
      if (groups.actions[action].first == "gather") gathered.insert(groups.actions[action].second);
    }
    return gathered;
  }

  /// Several in flight, whose backwards come in any order and in one phase or two. Whether it went to its end.
  bool micro_batches() {
    const auto residency = draw_.chance(50) ? Residency::kStage : Residency::kMicroBatch;
    const bool splits = draw_.chance(40);
    const int64_t count = 1 + static_cast<int64_t>(draw_.below(4));
    struct InFlight {
      int64_t index;
      std::vector<size_t> reads;
      bool has_input_gradients = false;
    };
    std::vector<InFlight> in_flight;
    for (int64_t next = 0; next < count || !in_flight.empty();) {
      if (next < count && (in_flight.empty() || draw_.chance(50))) {
        reads_.clear();
        if (!phase({.index = next, .residency = residency}, [&] { return forward(); })) { // its exception reaches the program
          step_.give_up_micro_batches();
          return give_up();
        }
        in_flight.push_back({next++, reads_});
        continue;
      }
      const auto done = in_flight.begin() + static_cast<std::ptrdiff_t>(draw_.below(in_flight.size()));
      reads_ = done->reads;
      MicroBatch backward{.index = done->index, .phase = MicroBatchPhase::kBackward, .residency = residency};
      if (splits)
        backward.phase = done->has_input_gradients ? MicroBatchPhase::kWeightGradients : MicroBatchPhase::kInputGradients;
      const bool ends = backward.phase != MicroBatchPhase::kInputGradients;
      backward.is_last = ends && next == count && in_flight.size() == 1;
      if (!phase(backward, [&] { return backward_or_none(); })) return give_up();
      done->has_input_gradients = true;
      if (ends) in_flight.erase(done);
    }
    check_all_reduced();
    return true;
  }

  /// A backward runs, or fails, or there is none in its phase.
  bool backward_or_none() {
    const bool fails = draw_.chance(2), has_gradients = draw_.chance(90);
    if (fails) {
      failed_backward();
    } else if (has_gradients) {
      whole_backward();
    }
    return !fails;
  }

  void check_all_reduced() {
    for (size_t each = 0; each < groups.states.size(); ++each) {
      const bool reduces = groups.settings[each].rules.syncs;
      const bool waits = groups.settings[each].rules.keeps_gradients && !step_.is_last_backward();
      groups.check(!groups.has_pending(each) || !reduces || waits, "leaves gradients of a step", each);
    }
  }

  /// Gradients that were not reduced go on in the next backward, unless one has failed.
  bool give_up() {
    for (auto& state : groups.states) state.to_come = 0;
    return false;
  }

  void failed_backward() {
    const size_t before = groups.reduced.size();
    backward_events(draw_.below(100));
    groups.reduced.resize(before); // the ranks fail together
    for (const size_t each : step_.abandon_backward()) {
      auto& state = groups.states[each];
      landed_ -= std::exchange(state.pending, 0);
      state.landed = 0;
      state.joins = state.is_reducing = false;
    }
  }

  /// A last step that reduces everything.
  void end() {
    for (auto& each : groups.settings) each.rules.syncs = true;
    step_.set_is_last_backward(true);
    if (step_.state() == Step::State::kIdle) step_.begin_forward();
    whole_backward();
    groups.check(step_.state() == Step::State::kIdle, "does not end idle", 0);
    groups.check(groups.sum == landed_, "does not reduce each gradient once", 0);
  }

  Draw draw_, landings_;
  Step step_;
  std::vector<size_t> all_;    // groups that exist
  std::vector<size_t> order_;  // of a forward's reads, some perhaps twice
  std::vector<size_t> reads_;  // of the forward
  bool reads_nothing_ = false; // in backward
  size_t landed_ = 0;
  std::set<size_t> landed_now_; // groups, in this backward
  std::set<size_t> by_hand_;    // gathered so, and not read since
};

TEST(Step, KeepsItsPromisesInAnySequenceOfEvents) {
  const unsigned long sequences = full_run() ? 1'000'000 : 20'000;
  for (unsigned long i = 0; i < sequences; ++i) {
    const unsigned long seed = test_seed() * 1'000'003 + i;
    Draw draw(seed);
    const Model model = draw_model(draw);
    Program first(model, seed, seed), again(model, seed, seed), another_order(model, seed, seed + 1);
    for (auto* program : {&first, &again, &another_order}) {
      program->run();
      ASSERT_EQ(program->groups.errors, "") << "sequence " << seed;
    }
    ASSERT_EQ(first.groups.actions, again.groups.actions) << "sequence " << seed;
    ASSERT_EQ(first.groups.reduced, another_order.groups.reduced) << "in whatever order gradients land: sequence " << seed;
  }
}

} // namespace
} // namespace tessera::testing::step_test
