// As much of MoRI's library as it is known by.
extern "C" {
void create_backend() __asm__("_ZN4mori2io8IOEngine13CreateBackendEv");
void create_backend() {}
void wait_all() __asm__("_ZN4mori2io8IOEngine7WaitAllEv");
void wait_all() {}
}
