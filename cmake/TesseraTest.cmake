# tessera_test(NAME name SOURCES file... [RANKS n...] [SIMULATED_RANKS n...] [LABELS label...] [LIBRARIES target...]
#              [TIMEOUT seconds] [ENVIRONMENT VAR=value...] [OVER_BOTH_TRANSPORTS] [HOSTS layout...])
#
# One GoogleTest program in build/<preset>/bin/tests, built on the precompiled header that all tests share. Its ctest label is the
# folder's name, plus LABELS.
# Without RANKS: one ctest entry, `name`. With RANKS: one entry a world size, `name.<n>ranks`, which runs `name --ranks <n>`; the
# main of tests/support starts the program as n local ranks, and every rank runs all tests of the program in lockstep.
# With SIMULATED_RANKS: an entry `name.simulated.<n>ranks` more for each of these, with the label simulated-device, which runs a few
# of the tests on the simulated device (all with TESSERA_TEST_FULL=1). Those after the first are run by `ctest -C Full` alone.
# OVER_BOTH_TRANSPORTS: each entry a second time with gloo in place of shared memory.
# With HOSTS: an entry `name.hosts<layout>` more for each of these, with as many ranks as it has digits, that of each rank's host.
function(tessera_test)
  cmake_parse_arguments(arg "OVER_BOTH_TRANSPORTS" "NAME;TIMEOUT" "SOURCES;RANKS;SIMULATED_RANKS;HOSTS;LABELS;LIBRARIES;ENVIRONMENT" ${ARGN})
  if(NOT arg_NAME OR NOT arg_SOURCES OR arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "tessera_test: NAME and SOURCES are needed, and these are unknown: '${arg_UNPARSED_ARGUMENTS}'")
  endif()
  add_executable(${arg_NAME} ${arg_SOURCES})
  target_link_libraries(${arg_NAME} PRIVATE tessera_test_base ${arg_LIBRARIES})
  target_precompile_headers(${arg_NAME} REUSE_FROM tessera_test_base)
  set_target_properties(${arg_NAME} PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/bin/tests")

  list(TRANSFORM arg_SOURCES PREPEND "${CMAKE_CURRENT_SOURCE_DIR}/")
  set_property(GLOBAL APPEND PROPERTY TESSERA_TEST_SOURCES ${arg_SOURCES})

  _tessera_add_entries("")
  set(environment ${arg_ENVIRONMENT})
  foreach(hosts IN LISTS arg_HOSTS)
    string(LENGTH ${hosts} ranks)
    set(arg_ENVIRONMENT ${environment} TESSERA_TEST_HOSTS=${hosts} GLOO_SOCKET_IFNAME=lo)
    _tessera_add_test(${arg_NAME}.hosts${hosts} ${ranks} COMMAND ${arg_NAME} --ranks ${ranks})
  endforeach()
  set(arg_ENVIRONMENT ${environment})
  if(arg_OVER_BOTH_TRANSPORTS)
    list(REMOVE_ITEM arg_RANKS 1) # alone a rank sends nothing
    list(APPEND arg_ENVIRONMENT TESSERA_TRANSPORT=gloo)
    _tessera_add_entries(".gloo")
  endif()
  list(APPEND arg_LABELS simulated-device)
  list(APPEND arg_ENVIRONMENT TESSERA_TEST_DEVICE=sim TESSERA_TEST_COUNT=5)
  set(configurations)
  foreach(ranks IN LISTS arg_SIMULATED_RANKS)
    _tessera_add_test(${arg_NAME}.simulated.${ranks}ranks ${ranks} COMMAND ${arg_NAME} --ranks ${ranks} ${configurations})
    set(configurations CONFIGURATIONS Full)
  endforeach()
endfunction()

# tessera_script_test(NAME name COMMAND command... [RANKS n] [LABELS label...] [TIMEOUT seconds] [ENVIRONMENT VAR=value...]):
# a ctest entry that runs a command, with the label and the environment of tessera_test. RANKS is the number of processes that the
# command starts.
function(tessera_script_test)
  cmake_parse_arguments(arg "" "NAME;RANKS;TIMEOUT" "COMMAND;LABELS;ENVIRONMENT" ${ARGN})
  if(NOT arg_RANKS)
    set(arg_RANKS 1)
  endif()
  _tessera_add_test(${arg_NAME} ${arg_RANKS} COMMAND ${arg_COMMAND})
endfunction()

# One ctest entry of a tessera_test, or one a world size.
function(_tessera_add_entries suffix)
  if(arg_RANKS)
    foreach(ranks IN LISTS arg_RANKS)
      _tessera_add_test(${arg_NAME}.${ranks}ranks${suffix} ${ranks} COMMAND ${arg_NAME} --ranks ${ranks})
    endforeach()
  else()
    _tessera_add_test(${arg_NAME}${suffix} 1 COMMAND ${arg_NAME})
  endif()
endfunction()

# Reads arg_LABELS, arg_TIMEOUT and arg_ENVIRONMENT of its caller. An entry all of whose tests were skipped, with nothing after
# GoogleTest's list of them, counts as skipped.
function(_tessera_add_test name processors)
  set(cost ${arg_TIMEOUT}) # the long ones first, also before ctest has measured them
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 300)
    set(cost 0)
  endif()
  set(collective_timeout 60)
  if(TESSERA_SANITIZER) # an instrumented rank takes seconds to start alone
    math(EXPR arg_TIMEOUT "4 * ${arg_TIMEOUT}")
    set(collective_timeout 240)
  endif()
  get_filename_component(folder "${CMAKE_CURRENT_SOURCE_DIR}" NAME)
  add_test(NAME ${name} ${ARGN})
  set_tests_properties(${name} PROPERTIES
    SKIP_REGULAR_EXPRESSION "\\[  PASSED  \\] 0 tests\\.(\n\\[  SKIPPED \\] [^\n]*)+\n*$"
    LABELS "${folder};${arg_LABELS}" PROCESSORS ${processors} TIMEOUT ${arg_TIMEOUT} COST ${cost}
    ENVIRONMENT "OMP_NUM_THREADS=1;TESSERA_TIMEOUT_SECONDS=${collective_timeout};${TESSERA_SANITIZER_ENVIRONMENT};${arg_ENVIRONMENT}")
endfunction()
