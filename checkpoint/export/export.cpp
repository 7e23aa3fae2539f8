#include <tessera/checkpoint/export/export.h>
#include <tessera/checkpoint/save/settle_differences.h>

namespace tessera::internal {

namespace {

checkpoint::SaveOptions save_options(const ExportOptions& options) {
  return {.overwrite = options.overwrite, .update_latest = false, .differing_tensors = options.differing_tensors};
}

} // namespace

Export::Export(const StateDict& state, const std::filesystem::path& target, const ExportOptions& options, const Staged& staged,
               const std::string& format, const std::function<std::string(const Snapshot&)>& check)
    : ranks_(options.mesh),
      session_(
          ranks_, target, save_options(options),
          [&] {
            choice_for_whole_tensors(options.differing_tensors, format); // for its error
            snapshot_ = filtered(snapshot_of(state), options.filter);
            return check(snapshot_);
          },
          staged),
      plan_(&planner_.plan(ranks_, snapshot_.state)) {
  const auto choice = choice_for_whole_tensors(options.differing_tensors, format);
  settle_differences(ranks_, choice, target.string(), *plan_, snapshot_);
}

} // namespace tessera::internal
