#include "process_request.h"

#include <c10/util/Exception.h>

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

namespace tessera::testing {

namespace {

constexpr size_t kMostBytes = 200'000;   // of a message, with the default size of a socket's buffer
constexpr size_t kMostDescriptors = 253; // of a message
constexpr int kSignals = 64;

/// What a message begins with. The numbers of the descriptors follow, and the texts, each with its final zero.
struct Head {
  size_t descriptors, arguments, variables;
  std::array<rlimit, RLIM_NLIMITS> limits;
  sigset_t blocked;
  uint64_t ignored;
  bool is_session, is_group;
};

template <typename T>
void put(std::string& message, const T& value) {
  message.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

template <typename T>
T take(const char*& from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  from += sizeof(value);
  return value;
}

std::string take_text(const char*& from) {
  std::string text(from);
  from += text.size() + 1;
  return text;
}

std::string message_of(const ProcessRequest& request) {
  std::string message;
  put(message, Head{request.descriptors.size(), request.arguments.size(), request.variables.size(), request.limits,
                    request.blocked, request.ignored, request.is_session, request.is_group});
  for (const auto& [number, own] : request.descriptors) put(message, number);
  message.append(request.folder).push_back('\0');
  for (const auto* texts : {&request.arguments, &request.variables})
    for (const auto& text : *texts) message.append(text).push_back('\0');
  return message;
}

ProcessRequest request_of(const char* from, const std::vector<int>& received) {
  const auto head = take<Head>(from);
  ProcessRequest request{.limits = head.limits,
                         .blocked = head.blocked,
                         .ignored = head.ignored,
                         .is_session = head.is_session,
                         .is_group = head.is_group};
  TORCH_CHECK(head.descriptors == received.size(), "of ", head.descriptors, " descriptors ", received.size(), " have come");
  for (const int descriptor : received) request.descriptors[take<int>(from)] = descriptor;
  request.folder = take_text(from);
  for (size_t i = 0; i < head.arguments; ++i) request.arguments.push_back(take_text(from));
  for (size_t i = 0; i < head.variables; ++i) request.variables.push_back(take_text(from));
  return request;
}

/// Room for the descriptors of a message.
union Control {
  cmsghdr alignment;
  char bytes[CMSG_SPACE(kMostDescriptors * sizeof(int))];
};

std::vector<int> descriptors_of(msghdr& message) {
  std::vector<int> descriptors;
  for (auto* part = CMSG_FIRSTHDR(&message); part != nullptr; part = CMSG_NXTHDR(&message, part)) {
    if (part->cmsg_type != SCM_RIGHTS) continue;
    descriptors.resize((part->cmsg_len - CMSG_LEN(0)) / sizeof(int));
    std::memcpy(descriptors.data(), CMSG_DATA(part), descriptors.size() * sizeof(int));
  }
  return descriptors;
}

__rlimit_resource resource(size_t number) { return static_cast<__rlimit_resource>(number); }

void take_descriptors(const std::map<int, int>& descriptors) {
  const int above = descriptors.empty() ? 0 : descriptors.rbegin()->first + 1;
  std::map<int, int> moved; // out of the way of the numbers
  for (const auto& [number, received] : descriptors) moved[number] = fcntl(received, F_DUPFD, above);
  if (above > 0) close_range(0, static_cast<unsigned>(above) - 1, 0);
  for (const auto& [number, own] : moved) TORCH_CHECK(dup2(own, number) == number, "cannot take descriptor ", number);
  close_range(static_cast<unsigned>(above), ~0U, 0);
}

} // namespace

ProcessRequest request_of_this_process() {
  ProcessRequest request{.folder = std::filesystem::current_path().string()};
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int descriptor = std::stoi(entry.path().filename().string());
    const int flags = fcntl(descriptor, F_GETFD);
    if (flags >= 0 && (flags & FD_CLOEXEC) == 0) request.descriptors[descriptor] = descriptor;
  }
  for (size_t i = 0; i < request.limits.size(); ++i) getrlimit(resource(i), &request.limits[i]);
  pthread_sigmask(SIG_BLOCK, nullptr, &request.blocked);
  for (int signal = 1; signal <= kSignals; ++signal) {
    struct sigaction action = {};
    if (sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN) request.ignored |= uint64_t{1} << (signal - 1);
  }
  return request;
}

void send_request(int connection, const ProcessRequest& request) {
  auto text = message_of(request);
  std::vector<int> descriptors;
  for (const auto& [number, own] : request.descriptors) descriptors.push_back(own);
  TORCH_CHECK(text.size() <= kMostBytes && descriptors.size() <= kMostDescriptors, "a program's start has ", text.size(),
              " bytes and ", descriptors.size(), " descriptors, more than fit into a message");
  iovec bytes{text.data(), text.size()};
  Control control = {};
  msghdr message = {};
  message.msg_iov = &bytes;
  message.msg_iovlen = 1;
  message.msg_control = control.bytes;
  message.msg_controllen = CMSG_SPACE(descriptors.size() * sizeof(int));
  auto* const part = CMSG_FIRSTHDR(&message);
  part->cmsg_level = SOL_SOCKET;
  part->cmsg_type = SCM_RIGHTS;
  part->cmsg_len = CMSG_LEN(descriptors.size() * sizeof(int));
  std::memcpy(CMSG_DATA(part), descriptors.data(), descriptors.size() * sizeof(int));
  TORCH_CHECK(sendmsg(connection, &message, MSG_NOSIGNAL) == static_cast<ssize_t>(text.size()),
              "cannot ask for a fork: ", std::strerror(errno));
}

bool receive_request(int connection, ProcessRequest& request) {
  std::vector<char> text(kMostBytes);
  iovec bytes{text.data(), text.size()};
  Control control = {};
  msghdr message = {};
  message.msg_iov = &bytes;
  message.msg_iovlen = 1;
  message.msg_control = control.bytes;
  message.msg_controllen = sizeof(control.bytes);
  const auto count = recvmsg(connection, &message, MSG_CMSG_CLOEXEC);
  if (count <= 0) return false;
  request = request_of(text.data(), descriptors_of(message));
  return true;
}

void become(const ProcessRequest& request) {
  if (request.is_session) setsid();
  if (request.is_group) setpgid(0, 0);
  std::filesystem::current_path(request.folder);
  for (size_t i = 0; i < request.limits.size(); ++i) setrlimit(resource(i), &request.limits[i]);
  take_descriptors(request.descriptors);
  clearenv();
  for (const auto& variable : request.variables) {
    const auto end_of_name = variable.find('=');
    setenv(variable.substr(0, end_of_name).c_str(), variable.c_str() + end_of_name + 1, 1);
  }
}

void take_signals(const ProcessRequest& request) {
  for (int signal = 1; signal <= kSignals; ++signal) {
    const bool is_ignored = (request.ignored >> (signal - 1) & 1) != 0;
    if (signal != SIGKILL && signal != SIGSTOP) std::signal(signal, is_ignored ? SIG_IGN : SIG_DFL);
  }
  pthread_sigmask(SIG_SETMASK, &request.blocked, nullptr);
}

} // namespace tessera::testing
