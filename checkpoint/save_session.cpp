#include <c10/util/Exception.h>
#include <tessera/checkpoint/catalog.h>
#include <tessera/checkpoint/save_session.h>

#include <algorithm>
#include <chrono>
#include <limits>

namespace tessera::checkpoint {

SaveSession::SaveSession(const Ranks& ranks, const std::filesystem::path& target, const SaveOptions& options)
    : ranks_(ranks), target_(target.string()), options_(options) {
  const auto folders = all("start to save", [&] {
    TORCH_CHECK(options.keep_last >= 0, "keep_last is ", options.keep_last);
    if (ranks_.rank() == 0) {
      staging_.emplace(target, options.overwrite);
      if (options.update_latest) check_latest_is_link(staging_->target().parent_path());
    }
    return staging_ ? staging_->folder().string() : std::string();
  });
  folder_ = folders[0];
}

std::vector<std::string> SaveSession::all(const std::string& verb, const std::function<std::string()>& work) const {
  return ranks_.all(verb + " " + target_, work);
}

int64_t SaveSession::time() const {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const auto latest = time_of_latest(staging_->target().parent_path());
  return std::max<int64_t>(std::chrono::duration_cast<std::chrono::microseconds>(now).count(),
                           std::min(latest, std::numeric_limits<int64_t>::max() - 1) + 1);
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
