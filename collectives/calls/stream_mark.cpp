#include <tessera/collectives/calls/stream_mark.h>

#include <tessera/base/current_stream.h>

#include <c10/core/Event.h>

#include <memory>

namespace tessera::internal {

namespace {

class StreamMark final : public WorkState {
 public:
  explicit StreamMark(const c10::Stream& stream) : event_(stream.device_type()), device_(stream.device()) {
    event_.record(stream);
  }
  void wait() override { event_.block(current_stream(device_)); }
  bool is_completed() override { return event_.query(); }
  bool blocks_host() const override { return false; }

 private:
  c10::Event event_;
  c10::Device device_;
};

} // namespace

Work mark(const c10::Stream& stream) { return Work(std::make_shared<StreamMark>(stream)); }

} // namespace tessera::internal
