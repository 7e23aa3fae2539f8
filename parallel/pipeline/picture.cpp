// Simulated steps as pictures.
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <map>
#include <set>

#include <tessera/parallel/pipeline_schedule.h>

namespace tessera {

namespace {

constexpr double kWidth = 1200, kRow = 28, kMargin = 70;

/// Forwards blue, backwards green, weight gradients yellow; paler in a rank's later stages.
const char* color_of(PipelineWork work) {
  switch (work) {
    case PipelineWork::kForward: return "#4c78c8";
    case PipelineWork::kBackward: return "#3f9b63";
    case PipelineWork::kInputGradients: return "#6cc08b";
    default: return "#e0b84c";
  }
}

void add_box(std::string& text, const PipelineSimulation::Span& span, double left, double top, double width, double height,
             double opacity) {
  text += fmt::format(R"(<g><title>{} from {:g} to {:g}</title>)", to_string(span.action), span.begin, span.end);
  text +=
      fmt::format(R"(<rect x="{:.2f}" y="{:.2f}" width="{:.2f}" height="{:.2f}" fill="{}" fill-opacity="{}" stroke="white"/>)",
                  left, top, width, height, color_of(span.action.work), opacity);
  if (width > 9) {
    text += fmt::format(R"(<text x="{:.2f}" y="{:.2f}" text-anchor="middle">{}</text>)", left + width / 2, top + height / 2 + 4,
                        span.action.micro_batch);
  }
  text += "</g>\n";
}

/// What overlaps lies one above the other.
void add_row(std::string& text, const PipelineSimulation::Rank& rank, double top, double scale) {
  std::set<int64_t> stages;
  for (const auto& span : rank.spans) stages.insert(span.action.stage);
  std::map<int64_t, double> opacity;
  for (const auto stage : stages)
    opacity.emplace(stage, 1 - 0.45 * static_cast<double>(opacity.size()) / static_cast<double>(stages.size()));
  bool is_lower = false;
  for (const auto& span : rank.spans) {
    if (span.action.micro_batch < 0) continue;
    const bool is_upper = span.action.overlaps_next;
    const double height = is_upper || is_lower ? (kRow - 4) / 2 : kRow - 4;
    add_box(text, span, kMargin + span.begin * scale, top + (is_lower ? height : 0), (span.end - span.begin) * scale, height,
            opacity.at(span.action.stage));
    is_lower = is_upper;
  }
}

} // namespace

std::string to_svg(const PipelineSimulation& simulation) {
  const auto ranks = static_cast<double>(simulation.ranks.size());
  const double scale = simulation.makespan > 0 ? (kWidth - kMargin - 10) / simulation.makespan : 0;
  auto text = fmt::format(
      R"(<svg xmlns="http://www.w3.org/2000/svg" width="{0}" height="{1}" viewBox="0 0 {0} {1}" font-family="sans-serif" font-size="11">)"
      "\n",
      kWidth, ranks * kRow + 30);
  for (size_t rank = 0; rank < simulation.ranks.size(); ++rank) {
    const double top = kRow * static_cast<double>(rank) + 4;
    text += fmt::format(R"(<text x="8" y="{:.2f}">rank {}</text>)"
                        "\n",
                        top + kRow / 2 + 2, rank);
    add_row(text, simulation.ranks[rank], top, scale);
  }
  return text + fmt::format(R"(<text x="{}" y="{:.2f}">{:g} in all, {:.1f} % of it idle</text>)"
                            "\n</svg>\n",
                            kMargin, ranks * kRow + 22, simulation.makespan, 100 * simulation.idle_share());
}

} // namespace tessera
