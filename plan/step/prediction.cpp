#include <tessera/plan/prediction.h>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <array>
#include <utility>

#include <tessera/base/text_table.h>
#include <tessera/plan/meta_operators.h>
#include <tessera/plan/step/planned_step.h>

namespace tessera {

namespace {

using nlohmann::ordered_json;

using Category = std::pair<const char*, int64_t PlanMemory::*>;
constexpr std::array<Category, 9> kCategories{{{"parameters", &PlanMemory::parameters},
                                               {"buffers", &PlanMemory::buffers},
                                               {"optimizer_state", &PlanMemory::optimizer_state},
                                               {"gradients", &PlanMemory::gradients},
                                               {"unsharded", &PlanMemory::unsharded},
                                               {"reduce_buffers", &PlanMemory::reduce_buffers},
                                               {"cached", &PlanMemory::cached},
                                               {"activations", &PlanMemory::activations},
                                               {"temporaries", &PlanMemory::temporaries}}};

ordered_json json_of(const PlanMesh& mesh) {
  return {{"pp", mesh.pp}, {"replicate", mesh.replicate}, {"shard", mesh.shard}, {"cp", mesh.cp}, {"tp", mesh.tp},
          {"ep", mesh.ep}};
}

ordered_json json_of(const PlanSettings& settings) {
  return {{"text", settings.to_string()},
          {"mesh", json_of(settings.mesh)},
          {"strategy", row_of(settings.strategy).name},
          {"precision", to_string(settings.precision)},
          {"rows", settings.rows},
          {"accumulation", settings.accumulation},
          {"recompute", settings.recompute},
          {"keeps", settings.keeps == RecomputeKeeps::kNothing ? "nothing" : "second products"},
          {"float8", !settings.float8                             ? "off"
                     : *settings.float8 == Float8Scaling::kTensor ? "tensor"
                                                                  : "rows"},
          {"context_order", internal::name_of(settings.context_order)},
          {"float8_gather", settings.float8_gather},
          {"resident_stages", settings.resident_stages},
          {"optimizer", settings.optimizer}};
}

ordered_json json_of(const PlanMemory& memory) {
  ordered_json bytes;
  for (const auto& [name, member] : kCategories) bytes[name] = memory.*member;
  return bytes;
}

} // namespace

int64_t PlanMemory::total() const {
  int64_t sum = 0;
  for (const auto& [name, member] : kCategories) sum += this->*member;
  return sum;
}

std::string Prediction::to_string() const {
  std::vector<internal::TextRow> rows{{fmt::format("memory at the peak, in {}", peak_phase), "bytes"}};
  for (const auto& [name, member] : kCategories) {
    std::string words = name;
    for (auto& letter : words) letter = letter == '_' ? ' ' : letter;
    rows.push_back({std::move(words), std::to_string(memory.*member)});
  }
  rows.push_back({"together", std::to_string(peak())});
  if (host_bytes > 0) rows.push_back({"on the host or in files", std::to_string(host_bytes)});
  const auto gathers_text = settings.mesh.pp > 1 ? fmt::format("on the rank that gathers most {} all-gathers", gathers)
                                                 : fmt::format("{} of them all-gathers", gathers);
  return fmt::format("{}: {}, {} parameters\n", model, settings.to_string(), parameters) + internal::text_table(rows, {"bytes"}) +
         fmt::format(
             "\nstep: {:.4g} s, of which {:.4g} s compute and {:.4g} s wait; {:.4g} rows/s; {} collectives of {} bytes, {}; "
             "{:.4g} floating-point operations\n",
             seconds, compute, exposed, rows_per_second(), collectives, bytes_sent, gathers_text, flops);
}

std::string Prediction::to_json() const {
  return ordered_json{{"format", "tessera prediction"},
                      {"version", 1},
                      {"model", model},
                      {"settings", json_of(settings)},
                      {"parameters", parameters},
                      {"memory", json_of(memory)},
                      {"peak", peak()},
                      {"peak_phase", peak_phase},
                      {"forward_peak", forward_peak},
                      {"backward_peak", backward_peak},
                      {"optimizer_peak", optimizer_peak},
                      {"host_bytes", host_bytes},
                      {"seconds", seconds},
                      {"compute", compute},
                      {"exposed", exposed},
                      {"communication", communication},
                      {"bytes_sent", bytes_sent},
                      {"collectives", collectives},
                      {"gathers", gathers},
                      {"flops", flops},
                      {"global_rows", global_rows()},
                      {"rows_per_second", rows_per_second()}}
      .dump(2);
}

Prediction predict(const PlannedModel& model, const Machine& machine, const PlanSettings& settings) {
  internal::check_planned(model, machine, settings);
  register_meta_operators();
  return settings.mesh.pp > 1 ? internal::predict_pipeline(model, machine, settings)
                              : internal::predict_flat(model, machine, settings);
}

} // namespace tessera
