#pragma once

// Internal: a search, and what its limits cost.

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <tessera/plan/search.h>
#include <tessera/plan/search/candidates.h>

namespace tessera::internal {

/// Steps settings, and keeps what each took.
class Search {
 public:
  Search(const PlannedModel& model, const Machine& machine, const SearchOptions& options);

  /// Returns those that fit `budget` bytes of a rank: for each candidate its fastest, the fastest first.
  std::vector<Prediction> fitting(int64_t budget, const std::vector<Candidate>& candidates);
  const std::vector<Candidate>& candidates() const { return candidates_; }
  /// Returns the one that needs least of all that were stepped.
  std::optional<Prediction> smallest() const;
  int64_t stepped() const { return static_cast<int64_t>(known_.size()); }
  int64_t considered() const { return considered_; }
  /// Settings that would have been stepped, had there been steps left.
  int64_t left_out() const { return left_out_; }
  void allow_steps(int64_t more) { most_steps_ += more; }
  /// How many settings ended in an error, and the first of these.
  int64_t refused() const { return refused_; }
  const std::string& first_refusal() const { return first_refusal_; }

 private:
  /// Nothing for settings that do not fit the model.
  std::optional<Prediction> step(const PlanSettings& settings);
  /// The most rows that fit.
  std::optional<Prediction> largest(const Candidate& candidate, int64_t budget, double least_speed);
  bool can_be_faster(const Candidate& candidate, double speed) const;
  bool fits(const Prediction& prediction, int64_t budget) const;

  const PlannedModel& model_;
  const Machine& machine_;
  const SearchOptions& options_;
  std::vector<Candidate> candidates_;
  std::map<std::string, std::optional<Prediction>> known_; ///< by the settings' text
  std::map<PlanPrecision, double> flops_a_row_;            ///< the fewest so far, on all ranks, without recomputation
  int64_t considered_ = 0, refused_ = 0, left_out_ = 0;
  int64_t most_steps_;
  std::string first_refusal_;
};

/// What the best plan would gain with more memory and lose with less, and with and without recomputation.
std::vector<PlanLimit> limits_of(Search& search, const Prediction& best, int64_t budget);

} // namespace tessera::internal
