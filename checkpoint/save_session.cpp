#include <c10/util/Exception.h>
#include <tessera/checkpoint/catalog.h>
#include <tessera/checkpoint/save_session.h>

namespace tessera::checkpoint {

SaveSession::SaveSession(const Ranks& ranks, const std::filesystem::path& target, const SaveOptions& options)
    : ranks_(ranks), target_(target.string()), options_(options) {
  TORCH_CHECK(target.filename() != kLatestName, "checkpoint: ", target_, ": the name \"", kLatestName,
              "\" is kept for the link to the newest checkpoint");
  TORCH_CHECK(options.keep_last >= 0, "checkpoint: keep_last is ", options.keep_last);
  const auto folders = all("start to save", [&] {
    if (ranks_.rank() == 0) staging_.emplace(target, options.overwrite);
    return staging_ ? staging_->folder().string() : std::string();
  });
  folder_ = folders[0];
}

std::vector<std::string> SaveSession::all(const std::string& verb, const std::function<std::string()>& work) const {
  return ranks_.all(verb + " " + target_, work);
}

void SaveSession::commit(const std::function<void()>& finish) {
  all("commit", [&] {
    if (staging_) {
      finish();
      staging_->commit();
    }
    return std::string();
  });
  all("tidy up after the save of", [&] {
    if (staging_ && options_.update_latest) point_latest_to(staging_->target());
    if (staging_ && options_.keep_last > 0) keep_last(staging_->target().parent_path(), options_.keep_last, staging_->target());
    return std::string();
  });
}

} // namespace tessera::checkpoint
