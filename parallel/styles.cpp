#include <tessera/parallel/styles.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace tessera {

namespace {

/// "Rowwise(input Shard(1), output Shard(1))", of what differs from the default.
class Text {
 public:
  explicit Text(const char* name) : name_(name) {}
  Text& with(const char* option, const Placement& value) {
    if (!is_replicate(value)) parts_.push_back(fmt::format("{} {}", option, to_string(value)));
    return *this;
  }
  Text& with(const char* option, const std::optional<Placement>& value) {
    if (value) parts_.push_back(fmt::format("{} {}", option, to_string(*value)));
    return *this;
  }
  Text& with(std::string part) {
    parts_.push_back(std::move(part));
    return *this;
  }
  std::string done() const { return parts_.empty() ? name_ : fmt::format("{}({})", name_, fmt::join(parts_, ", ")); }

 private:
  std::string name_;
  std::vector<std::string> parts_;
};

struct Describe {
  std::string operator()(const Colwise& style) const {
    Text text("Colwise");
    text.with("input", style.input).with("output", style.output);
    if (style.packed > 1) text.with(fmt::format("packed {}", style.packed));
    if (style.heads > 0) text.with(fmt::format("heads {}", style.heads));
    return text.done();
  }
  std::string operator()(const KeyHeads& style) const {
    return Text("KeyHeads").with(fmt::format("{}", style.heads)).with("input", style.input).done();
  }
  std::string operator()(const Rowwise& style) const {
    return Text("Rowwise").with("input", style.input).with("output", style.output).done();
  }
  std::string operator()(const VocabParallel& style) const { return Text("VocabParallel").with("output", style.output).done(); }
  std::string operator()(const Sequence& style) const { return Text("Sequence").with(fmt::format("dim {}", style.dim)).done(); }
  std::string operator()(const Replicated& /*style*/) const { return "Replicated"; }
  std::string operator()(const PrepareInput& style) const {
    return Text("PrepareInput").with("input", style.input).with(to_string(style.desired)).done();
  }
  std::string operator()(const PrepareOutput& style) const { return Text("PrepareOutput").with(to_string(style.desired)).done(); }
};

} // namespace

std::string to_string(const ParallelStyle& style) { return std::visit(Describe(), style); }

std::string to_string(const ParallelPlan& plan) {
  std::string text;
  for (const auto& line : plan)
    text += fmt::format("{}: {}\n", line.modules.empty() ? "(the module itself)" : line.modules, to_string(line.style));
  return text;
}

} // namespace tessera
