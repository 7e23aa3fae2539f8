// The text form of schedules, which torch.distributed.pipelining writes and reads too.
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <optional>

#include <tessera/parallel/pipeline_schedule.h>

namespace tessera {

namespace {

struct WorkName {
  PipelineWork work;
  std::string_view name;
};
constexpr std::array kNames{WorkName{PipelineWork::kForward, "F"},        WorkName{PipelineWork::kBackward, "B"},
                            WorkName{PipelineWork::kInputGradients, "I"}, WorkName{PipelineWork::kWeightGradients, "W"},
                            WorkName{PipelineWork::kUnshard, "UNSHARD"},  WorkName{PipelineWork::kReshard, "RESHARD"}};
/// PyTorch may write these too. They follow from the rest.
constexpr std::array<std::string_view, 5> kPassedOver{"SEND_F", "RECV_F", "SEND_B", "RECV_B", "REDUCE_GRAD"};
constexpr std::string_view kOverlap = "OVERLAP_F_B";

std::string_view name_of(PipelineWork work) {
  return std::find_if(kNames.begin(), kNames.end(), [=](const auto& each) { return each.work == work; })->name;
}

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kBlank = " \t\r\n";
  const auto begin = std::min(text.find_first_not_of(kBlank), text.size());
  return text.substr(begin, text.find_last_not_of(kBlank) + 1 - begin);
}

std::vector<std::string_view> split(std::string_view text, char between) {
  std::vector<std::string_view> parts;
  for (size_t begin = 0; begin <= text.size();) {
    const auto end = std::min(text.find(between, begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

/// The number at the begin of `text`, which it takes off; -1 where there is none.
int64_t take_number(std::string_view& text) {
  int64_t number = -1;
  const auto end = std::min(text.find_first_not_of("0123456789"), text.size());
  if (end == 0 || std::from_chars(text.data(), text.data() + end, number).ec != std::errc()) return -1;
  text.remove_prefix(end);
  return number;
}

/// "2F0"; nothing for what is passed over.
std::optional<PipelineAction> read_action(std::string_view word, const std::string& place) {
  auto rest = word;
  PipelineAction action;
  action.stage = take_number(rest);
  const auto name = rest.substr(0, rest.find_first_of("0123456789"));
  rest.remove_prefix(name.size());
  action.micro_batch = take_number(rest);
  const auto error = [&] { return c10::str(place, ": \"", word, "\" is no action of a pipeline, as 2F0 or 1UNSHARD"); };
  TORCH_CHECK(action.stage >= 0 && rest.empty(), error());
  if (std::find(kPassedOver.begin(), kPassedOver.end(), name) != kPassedOver.end()) return std::nullopt;
  const auto* const found = std::find_if(kNames.begin(), kNames.end(), [=](const auto& each) { return each.name == name; });
  const bool is_of_one = name.size() == 1; // a micro-batch
  TORCH_CHECK(found != kNames.end() && is_of_one == (action.micro_batch >= 0), error());
  action.work = found->work;
  return action;
}

/// "(0F4;3B0)OVERLAP_F_B" as two actions; any other as one.
void read_word(std::string_view word, const std::string& place, std::vector<PipelineAction>& actions) {
  if (word.empty()) return; // a column in which the rank waits
  const auto add = [&](std::string_view single, bool overlaps) {
    auto action = read_action(trimmed(single), place);
    if (!action) return;
    action->overlaps_next = overlaps;
    actions.push_back(*action);
  };
  if (word.front() != '(') return add(word, false);
  const auto end = word.find(')');
  TORCH_CHECK(end != std::string_view::npos && word.substr(end + 1) == kOverlap, place, ": \"", word,
              "\" is no overlap of two actions, as (0F4;3B0)OVERLAP_F_B");
  const auto both = split(word.substr(1, end - 1), ';');
  TORCH_CHECK(both.size() == 2, place, ": \"", word, "\" overlaps ", both.size(), " actions, and not two");
  add(both[0], true);
  add(both[1], false);
}

/// Fills in what the actions tell of their stages.
void find_stages(PipelineSchedule& schedule) {
  std::map<int64_t, int64_t> rank_of_stage;
  for (size_t rank = 0; rank < schedule.actions.size(); ++rank) {
    for (const auto& action : schedule.actions[rank]) {
      rank_of_stage.emplace(action.stage, static_cast<int64_t>(rank));
      schedule.micro_batches = std::max(schedule.micro_batches, action.micro_batch + 1);
    }
  }
  for (const auto& [stage, rank] : rank_of_stage) {
    TORCH_CHECK(stage == schedule.stages(), "the schedule ", schedule.name, " has a stage ", stage, " and no stage ",
                schedule.stages());
    schedule.rank_of_stage.push_back(rank);
  }
}

} // namespace

std::string to_string(const PipelineAction& action) {
  return c10::str(action.stage, name_of(action.work)) + (action.micro_batch < 0 ? "" : std::to_string(action.micro_batch));
}

std::string to_csv(const PipelineSchedule& schedule) {
  std::string text;
  for (const auto& actions : schedule.actions) {
    for (size_t i = 0; i < actions.size(); ++i) {
      if (i > 0) text += ',';
      if (!actions[i].overlaps_next || i + 1 == actions.size()) {
        text += to_string(actions[i]);
        continue;
      }
      text += c10::str('(', to_string(actions[i]), ';', to_string(actions[i + 1]), ')', kOverlap);
      ++i;
    }
    text += '\n';
  }
  return text;
}

PipelineSchedule schedule_from_csv(std::string_view text, std::string name) {
  PipelineSchedule schedule;
  schedule.name = std::move(name);
  for (const auto line : split(trimmed(text), '\n')) {
    auto& actions = schedule.actions.emplace_back();
    int64_t column = 0;
    for (const auto word : split(line, ',')) {
      const auto place = c10::str("the schedule ", schedule.name, ", rank ", schedule.ranks() - 1, ", column ", ++column);
      read_word(trimmed(word), place, actions);
    }
  }
  find_stages(schedule);
  check_schedule(schedule);
  return schedule;
}

} // namespace tessera
