#include <tessera/training/loop/run/event_records.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <utility>

namespace tessera::internal {

namespace {

void add(LogRecord& record, const StepParts& parts) {
  if (parts.backward == 0) return; // nobody has asked for them
  const std::pair<const char*, double> seconds[]{
      {"forward", parts.forward}, {"backward", parts.backward}, {"norm", parts.norm}, {"optimizer", parts.optimizer}};
  for (const auto& [name, value] : seconds) record.numbers.emplace_back(std::string(name) + "_seconds", value);
}

} // namespace

LogRecord record_of(const StepEvent& event) {
  LogRecord record{.kind = "step", .step = event.step, .numbers = {}, .texts = {}};
  record.numbers = {{"loss", event.loss},
                    {"max_loss", event.max_loss},
                    {"grad_norm", event.grad_norm},
                    {"clip_coefficient", event.clip_coefficient},
                    {"learning_rate", event.learning_rate},
                    {"loss_scale", event.loss_scale},
                    {"skipped", event.outcome == StepOutcome::kSkipped ? 1.0 : 0.0},
                    {"epochs", static_cast<double>(event.epochs)},
                    {"rows", static_cast<double>(event.rows)},
                    {"count", event.count},
                    {"seconds", event.seconds},
                    {"rows_per_second", event.rows_per_second},
                    {"counts_per_second", event.counts_per_second},
                    {"data_wait_share", event.data_wait_share},
                    {"resident_bytes", static_cast<double>(event.resident_bytes)}};
  if (event.device_bytes > 0) record.numbers.emplace_back("device_bytes", static_cast<double>(event.device_bytes));
  if (event.flops_utilization > 0) record.numbers.emplace_back("flops_utilization", event.flops_utilization);
  add(record, event.parts);
  for (const auto& [name, value] : event.also) record.numbers.emplace_back(name, value);
  return record;
}

LogRecord record_of(const EvaluationEvent& event) {
  LogRecord record{.kind = "evaluation", .step = event.step, .numbers = {}, .texts = {}};
  record.numbers = {{event.name + ".loss", event.loss}, {event.name + ".count", event.count}};
  for (const auto& [name, value] : event.also) record.numbers.emplace_back(event.name + '.' + name, value);
  return record;
}

LogRecord record_of(const SaveEvent& event) {
  return {.kind = event.is_best ? "save of the best" : "save",
          .step = event.step,
          .numbers = {},
          .texts = {{"folder", event.folder.string()}}};
}

LogRecord record_of(const ResumeEvent& event) {
  LogRecord record{.kind = "resume", .step = event.step, .numbers = {}, .texts = {{"folder", event.folder.string()}}};
  if (!event.differences.empty()) record.texts.emplace_back("differences", fmt::format("{}", fmt::join(event.differences, "\n")));
  return record;
}

LogRecord record_of(const StopEvent& event) {
  return {.kind = "stop", .step = event.steps, .numbers = {}, .texts = {{"reason", event.text}}};
}

std::string line_of(const StepEvent& event) {
  auto line = fmt::format("loss {:.4f}  norm {:.3f}", event.loss, event.grad_norm);
  for (const auto& [name, value] : event.also) line += fmt::format("  {} {:.4f}", name, value);
  line += fmt::format("  lr {:.2e}  {:.0f}/s", event.learning_rate, event.counts_per_second);
  return event.outcome == StepOutcome::kSkipped ? line + "  skipped" : line;
}

std::string line_of(const EvaluationEvent& event) {
  auto line = fmt::format("{} after {} steps: loss {:.4f}", event.name, event.step, event.loss);
  for (const auto& [name, value] : event.also) line += fmt::format("  {} {:.4f}", name, value);
  return line;
}

std::string line_of(const SaveEvent& event) { return "saved " + event.folder.string(); }

std::string line_of(const ResumeEvent& event) {
  auto line = fmt::format("goes on from {}, after {} steps", event.folder.string(), event.step);
  for (const auto& difference : event.differences) line += "\n  " + difference;
  return line;
}

std::string line_of(const StopEvent& event) { return fmt::format("ends after {} steps: {}", event.steps, event.text); }

} // namespace tessera::internal
